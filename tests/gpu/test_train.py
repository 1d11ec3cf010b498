"""Training on CUDA: precisions, resume, memory that runs out, and two GPUs where there are two."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tessella.artifacts.run import Run, Solver
from tessella.core.errors import OutOfMemory
from tessella.nn import fp8
from tessella.training.loop import train
from tests.support.training import VIT, losses, recipe, write_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("stripes"), train=40, val=18)


@pytest.fixture(scope="module")
def full(dataset, tmp_path_factory) -> Run:
    """FP32, 20 steps: more than the losses that are fetched together."""
    return train(recipe(dataset, epochs=5), tmp_path_factory.mktemp("full") / "run")


def test_equals_the_cpu(dataset, full, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = train(recipe(dataset, epochs=5), tmp_path / "run")
    assert losses(full)[:8] == pytest.approx(losses(on_cpu)[:8], rel=1e-3)
    assert [m.step for m in full.metrics()] == list(range(1, 21))


@pytest.mark.parametrize(("precision", "rel"), [("tf32", 5e-3), ("bf16", 5e-2), ("fp16", 1e-2)])
def test_precisions(dataset, full, tmp_path, precision, rel):
    run = train(recipe(dataset, epochs=5, precision=precision), tmp_path / "run")
    assert losses(run)[0] == pytest.approx(losses(full)[0], rel=rel)
    assert losses(run)[-1] < 0.3 * losses(run)[0]
    assert {w.dtype for w in run.latest().weights().values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch's compiler's own
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_eight_bits(dataset, tmp_path, monkeypatch):
    """Compiled, with our kernels and as a graph, beside bf16 call by call."""
    monkeypatch.setattr(fp8, "LEAST", 64)
    (tmp_path / "vit.py").write_text(VIT)
    settings = {"network": f"{tmp_path / 'vit.py'}:Small", "epochs": 10.0}
    settings |= {"solver": Solver(name="adamw", lr=1e-3)}
    plain = train(recipe(dataset, precision="bf16", fuse=False, **settings), tmp_path / "plain")
    run = train(recipe(dataset, precision="fp8", **settings), tmp_path / "run", races=False)
    assert any("torch.compile" in (e.text or "") for e in run.events() if e.name == "way")
    assert losses(run) == pytest.approx(losses(plain), rel=0.05)
    assert losses(run)[-1] < 0.5 * losses(run)[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resume(dataset, tmp_path, precision):
    settings = recipe(dataset, precision=precision, keep_last=9, solver=Solver(name="adamw"))
    run = train(settings, tmp_path / "run")
    expected, scaler = losses(run), _scaler(run)
    for checkpoint in run.checkpoints()[1:]:
        (checkpoint.path / "checkpoint.json").unlink()
    train(settings, run.path, resume=True)
    assert losses(run)[:4] == expected[:4]
    assert losses(run) == pytest.approx(expected, rel=0.02, abs=1e-3)
    assert _scaler(run) == scaler


def _scaler(run: Run) -> dict[str, float]:
    return run.latest().training_state()[1]["scaler"]


def test_out_of_memory_answers_with_a_batch_that_fits(dataset, tmp_path):
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()  # other tests' engines in this process
    torch.cuda.set_per_process_memory_fraction((held + (256 << 20)) / total)
    try:
        with pytest.raises(OutOfMemory) as caught:
            train(recipe(dataset, batch_size=1 << 14, epochs=1), tmp_path / "large")
        fits = int(caught.value.fix.split("--batch-size ")[1].split(":")[0])
        assert 64 <= fits < 1 << 14
        train(recipe(dataset, batch_size=fits, epochs=1), tmp_path / "fitting")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_gpus_give_the_curve_of_one(dataset, tmp_path, precision):
    one = train(recipe(dataset, precision=precision), tmp_path / "one")
    two = train(recipe(dataset, precision=precision, gpus=2), tmp_path / "two")
    # In fp16 the loss scale is found by overflowing, at other steps for gradients of other sizes.
    same = 8 if precision == "fp32" else 1
    assert losses(two)[:same] == pytest.approx(losses(one)[:same], rel=1e-3)
    assert losses(two)[-1] < 0.3 * losses(two)[0]
