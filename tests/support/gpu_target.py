"""What the tests on a GPU build for: ``TARGET`` of the environment, or Hopper."""

import os

TARGET = os.environ.get("TARGET", "sm_90")
