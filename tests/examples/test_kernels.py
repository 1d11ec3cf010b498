"""The examples of kernels run here, without a GPU: interpreted, or by their references."""

from __future__ import annotations

import httpx
import pytest
import torch

from examples.kernels import matmul_steps, own_layer, saxpy, stencil_1d, vector_add
from tessella.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:.*got tensors on the CPU:RuntimeWarning")


def test_saxpy(capsys):
    assert saxpy.main(2_500) < 1e-6
    assert "saxpy_kernel: grid 3, block 128 (4 warps)" in capsys.readouterr().out


def test_vector_add(capsys):
    vector_add.main(3_000)
    printed = capsys.readouterr().out
    assert "grid 12, block 32 (1 warps)" in printed
    assert "grid 2, block 256 (8 warps)" in printed


def test_stencil(capsys):
    assert stencil_1d.main(1_000) < 1e-5
    printed = capsys.readouterr().out
    assert "grid 4×1×1, block 256 (8 warps)" in printed
    assert "occupancy 100%" in printed


def test_matmul_steps():
    matmul_steps.main(40)
    for step in matmul_steps.STEPS[:-1]:
        assert step.check(torch.randn(24, 16).half(), torch.randn(16, 40).half()) < 1e-3


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_own_layer(tmp_path):
    ratio, error = own_layer.main(steps=25)
    assert ratio < 0.7
    assert error < 1e-5

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(1, 4), own_layer.Snake(4)).eval()
    path = own_layer.compiled(layer).save(tmp_path / "snake.plan")
    asked = {"name": "x", "shape": [3, 1], "datatype": "FP32", "data": [-2.0, 0.5, 1.0]}
    with Server({"snake": path}) as server:
        url = f"{server.url}/v2/models/snake/infer"
        answer = httpx.post(url, json={"inputs": [asked]}).raise_for_status().json()
    served = torch.tensor(answer["outputs"][0]["data"]).view(3, 4)
    torch.testing.assert_close(served, layer(torch.tensor(asked["data"])[:, None]).detach())
