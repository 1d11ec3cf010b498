"""What the tests on a GPU build for: ``TARGET`` of the environment, or Hopper."""

import os

TARGET = os.environ.get("TARGET", "sm_90")
# A search compiles hundreds of kernels for an older target, with nobody to believe its times: plans
# there have those that the cost model takes.
UNTUNED = TARGET != "sm_90"
