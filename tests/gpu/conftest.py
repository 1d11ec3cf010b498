"""``TARGET=sm_80 pytest tests/gpu``: the kernels of an older GPU, on the one that is here."""

import os
import re

import pytest
import torch

from benchmarks.older_gpu import as_if
from tessella.core.architectures import has
from tests.support.gpu_target import TARGET

# tests of what older GPUs do not have, or of what is the same for all targets
HOPPERS = re.compile(
    "sm90|hopper|wgmma|conv_chain|conv_pool|cudnn_graph|linear_norm|ahead_of_time|kernels_user"
    "|pictures|telemetry|test_train|test_fused|portable.py::test_first_layers|::test_pointwise"
    "|test_in_a_plan_it_writes|tried_on_the_gpu|sparse.py::(?!test_the_library)"
    "|conv_backward.py::test_(calls_are|constant_weights)"
)
FP8 = re.compile("float8|fp8")

if TARGET != "sm_90" and torch.cuda.is_available():
    as_if(TARGET)
# 16 processes of 16 threads each took 150 s for suppression's reference, one thread takes 0.5
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(workers)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TARGET != "sm_90":
        for item in (item for item in items if item.nodeid.startswith("tests/gpu")):
            lacks_fp8 = FP8.search(item.nodeid) and not has(TARGET, "fp8_mma")
            if HOPPERS.search(item.nodeid) or lacks_fp8:
                item.add_marker(pytest.mark.skip(reason=f"not for {TARGET}"))
