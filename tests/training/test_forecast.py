"""What is told of a training before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment, Recipe, Run, RunInfo
from tessella.artifacts.shards import SplitInfo
from tessella.core.errors import OutOfMemory, UsageError
from tessella.core.preprocess import Preprocess, Volume
from tessella.data.loading import batches
from tessella.nn import zoo
from tessella.search.limits import Limits
from tessella.tasks import named, names
from tessella.training import forecast as forecasting
from tessella.training import loop
from tessella.training.expected import kept_bytes
from tessella.training.forecast import fitting_batch, forecast
from tessella.training.loop import train
from tessella.training.memory import largest_that_runs
from tessella.training.parallel import alone
from tessella.training.prepare import describe_run
from tessella.training.race import Raced
from tessella.training.recomputing import recompute_blocks
from tessella.training.trainer import Trainer
from tests.support.cli import in_process
from tests.support.training import cramp, recipe, write_dataset


def really_kept(module: nn.Module, images: torch.Tensor) -> int:
    """Bytes of the tensors that torch saves in a real forward pass, and of the outputs."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept = {images.untyped_storage().data_ptr(): images}

    def keep(value):
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        outputs = module(images)
    return sum(t.untyped_storage().nbytes() for t in kept.values()) + outputs.nbytes


@pytest.mark.parametrize(
    ("name", "rel"),
    [
        ("lenet", 1e-3),
        ("resnet18", 1e-3),
        ("timm/vit_tiny_patch16_224", 0.1),  # which kernel of attention runs, shapes do not tell
    ],
)
def test_kept_values_are_those_that_torch_keeps(name, rel):
    size = (28, 28) if name == "lenet" else (64, 64)
    options = {"patch_size": 8} if "vit" in name else None
    record = zoo.network(name, classes=5, size=size, options=options)
    module = zoo.build(record)
    shape = (4, record.channels, *size)
    found = kept_bytes(module, shape, "fp32")
    assert found == pytest.approx(really_kept(module, torch.randn(shape)), rel=rel)
    assert kept_bytes(module, (8, *shape[1:]), "fp32") == pytest.approx(2 * found, rel=0.02)
    assert kept_bytes(module, shape, "bf16") < 0.65 * found
    assert not any(p.is_meta for p in module.parameters())


def test_what_needs_numbers_is_not_known():
    class Counting(nn.Module):
        def forward(self, x):
            return x[: int(x.sum().item() > 0) + 1]

    assert kept_bytes(Counting(), (4, 2), "fp32") is None


def test_a_forecast_adds_up(dataset, tmp_path):
    found = forecast(recipe(dataset, epochs=3.0, ema=0.9))
    module = zoo.build(zoo.network("lenet", classes=3, channels=1, size=12))
    weights = 4 * sum(p.numel() for p in module.parameters())
    memory = found.memory
    assert (memory.weights, memory.gradients, memory.solver) == (weights,) * 3
    assert (memory.average, found.steps_per_epoch, found.steps) == (weights, 4, 12)
    assert memory.total == 4 * weights + memory.kept
    assert found.parameters == found.trained == weights // 4
    assert found.epoch_s == pytest.approx(4 * (found.step_s + found.load_s))
    assert found.total_s == pytest.approx(3 * found.epoch_s)
    start = api.train("lenet", dataset, out=tmp_path / "run", epochs=1, batch_size=20).latest()
    tuned = forecast(recipe(dataset, init=str(start.path), freeze=2))
    assert tuned.trained < tuned.parameters
    assert tuned.memory.gradients == 4 * tuned.trained


def test_what_processes_will_exchange(dataset, monkeypatch):
    """A ring of n sends 2 (n - 1) / n of the gradients' bytes from each; a network's rate is not
    known before."""
    monkeypatch.setattr(forecasting, "_copied_a_second", lambda device: 1e9)
    found = [
        forecast(recipe(dataset, batch_size=12, **more))
        for more in ({}, {"gpus": 2}, {"gpus": 4}, {"gpus": 2, "nodes": 2})
    ]
    sent = found[0].memory.gradients
    assert [one.exchange_bytes for one in found] == [0, sent, sent, sent]
    times = [0.0, sent / 1e9, 1.5 * sent / 1e9]
    assert [one.exchange_s for one in found] == [pytest.approx(t) for t in times] + [None]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_says_what_a_step_takes(dataset, tmp_path, recompute):
    """Less where blocks are computed again, and nothing where shapes do not tell."""
    settings = recipe(dataset, network="resnet18", epochs=0.25, recompute=recompute)
    told = []
    run = train(settings, tmp_path / "run", emit=told.append)
    text = next(e.text for e in told if e.name == "train")
    module = zoo.build(run.info.network)
    if recompute:
        recompute_blocks(module)
    kept = really_kept(module, torch.randn(10, 1, 12, 12))
    weights = 4 * sum(p.numel() for p in module.parameters())
    statistics = sum(b.nbytes for b in module.buffers())
    total = 3 * weights + statistics + kept
    assert text == f"resnet18, 1 steps of about {total / 1e6:.3g} MB"


@pytest.mark.parametrize(("network", "raced"), [("resnet18", False), ("lenet", True)])
def test_a_run_says_how_long_an_epoch_takes(dataset, tmp_path, monkeypatch, network, raced):
    """By a race where one has shown it, and not where memory ends, of which the first step says
    more; finding out changes nothing of the training."""

    def without_memory(*given):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    if raced:
        known = (Raced(way="fused", step_s=9.0), Raced(way="eager", step_s=300.0))
        monkeypatch.setattr(forecasting, "recalled", lambda info: known)
    weights = []
    monkeypatch.setattr(loop, "LEAST_TOLD", 1)
    for tells in (True, False):
        if not tells:
            monkeypatch.setattr(loop, "expected_epoch_s", without_memory)
        told = []
        settings = recipe(dataset, network=network, epochs=0.5)
        run = train(settings, tmp_path / f"run{tells}", emit=told.append)
        text = next(e.text for e in told if e.name == "train")
        assert ("; an epoch takes about " in text) == tells
        assert not (raced and tells) or "20 min, all that is left 10 min" in text
        weights.append(run.latest().weights())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


WANTS_NUMBERS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, classes, channels, height, width):
        super().__init__()
        self.linear = torch.nn.Linear(channels * height * width, classes)
        assert self.linear.weight.abs().max().item() > 0

    def forward(self, x):
        return self.linear(x.flatten(1))
"""


def test_a_network_that_wants_numbers_trains_without(dataset, tmp_path):
    (tmp_path / "net.py").write_text(WANTS_NUMBERS)
    told = []
    settings = recipe(dataset, network=f"{tmp_path / 'net.py'}:Net", epochs=0.25)
    train(settings, tmp_path / "run", emit=told.append)
    assert next(e.text for e in told if e.name == "train").endswith("Net, 1 steps")


def test_a_batch_that_fits(tmp_path, monkeypatch):
    """At most 64 images on a CPU, 16 steps an epoch, and the memory that is there."""
    data = write_dataset(tmp_path / "data", train=700, val=3)
    assert fitting_batch(recipe(data)) == 32
    assert fitting_batch(recipe(data, accumulate=2)) == 2 * 16
    needs = forecasting.forecast(recipe(data, batch_size=8)).memory.total
    monkeypatch.setattr(forecasting, "free_bytes", lambda device: int(needs / 0.79))
    assert fitting_batch(recipe(data)) == 8
    run = api.train("lenet", data, out=tmp_path / "run", epochs=0.1, batch_size="auto")
    assert run.recipe.batch_size == 8
    monkeypatch.undo()
    again = api.train(
        "lenet", data, out=tmp_path / "run", epochs=0.2, batch_size="auto", resume=True
    )
    assert again.recipe.batch_size == 8


def test_a_step_is_tried_as_a_gpu_would(dataset, monkeypatch):
    """What does not fit comes out as torch says it, so that half of it is tried next."""
    cramp(monkeypatch)
    info = describe_run(recipe(dataset, augment=Augment(mixup=0.2), ema=0.9))
    trained = Dataset(dataset).train.info

    def tried(images: int) -> None:
        Trainer(info, trained, alone()).try_step(images)

    assert largest_that_runs(tried, 16) == 2


LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection": ("centernet", {"backbone": "resnet18", "width": 16}),
    "instances": ("mask_rcnn", {"backbone": "resnet18", "width": 16, "proposals": 20}),
    "segmentation": ("unet", {}),
    "volumes": ("unet3d", {"width": 4, "levels": 2}),
}


@pytest.mark.parametrize("name", names())
def test_every_task_learns_from_blank_images_and_answers_them(name):
    """A trial step, a race of ways and the times of layers feed nothing else."""
    task, classes = named(name), ("a", "b", "c")
    network, options = LEARNERS.get(name, ("lenet", {}))
    volume = Volume(slices=16) if name == "volumes" else None
    depth = {} if volume is None else {"channels": 1, "depth": 16}
    record = Preprocess(height=32, width=32, volume=volume, **depth)
    channels, *sides = record.input_shape
    info = RunInfo(
        recipe=Recipe(network=network, dataset="none", network_options=options),
        network=zoo.network(
            network, classes=task.head.width(len(classes)), channels=channels,
            size=tuple(sides), options=options, answers=task.head.ANSWERS,
        ),
        preprocess=record,
        labels=classes,
        dataset_hash="",
        created="",
        task=task.record({"mean": (0.0,) * 3, "std": (1.0,) * 3} if name == "regression" else {}),
    )  # fmt: skip
    trainer = Trainer(info, SplitInfo(count=4, class_counts=(2, 1, 1), shards={}), alone())
    before = [p.detach().clone() for p in trainer.module.parameters()]
    trainer.try_step(2)
    after = list(trainer.module.parameters())
    assert all(p.isfinite().all() for p in after)
    assert any((a != b).any() for a, b in zip(after, before, strict=True))
    trainer.answer_blank()


def test_images_that_do_not_fit_are_told(dataset, monkeypatch):
    """A batch without room for its images has no step whose answer would name one that fits."""

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried 94080000000 bytes"
        )

    monkeypatch.setattr(Trainer, "blank", refused)
    with pytest.raises(OutOfMemory, match="12 images do not fit"):
        forecast(recipe(dataset, batch_size=12))
    monkeypatch.setattr(torch, "empty", refused)
    data = Dataset(dataset)
    with pytest.raises(OutOfMemory, match="12 images do not fit in the memory of the host"):
        next(batches(data.train, data.preprocess, batch_size=12, augment=None, training=True))


def test_the_command_line_explains(dataset, tmp_path, monkeypatch, capsys):
    tessella = in_process(monkeypatch, capsys)
    machine = Limits(device="slow", copy_bytes_s=1e9, flops_s={"float32": 1e10})
    monkeypatch.setattr("tessella.cli.train.limits", lambda *_: machine)  # it takes seconds
    told = tessella("train", "lenet", dataset, "--explain", "--batch-size", "10", "--epochs", "2")
    assert told.code == 0
    for words in (
        "memory of a step",
        "an epoch",
        "solver.lr",
        "4 stages",
        "label_smoothing",
        "torch, call by call: nothing is fused: our",
        "not timed: --race gives it seconds",
        "least ms share conv",
    ):
        assert words in " ".join(told.out.split())
    plain = tessella("train", "lenet", dataset, "--explain", "--batch-size", "auto", "--json").json
    assert plain["recipe"]["batch_size"] == 4
    assert plain["memory"]["total"] > plain["memory"]["weights"]
    assert (plain["way"], plain["fastest"]) == ("eager", "eager")
    assert [w["way"] for w in plain["ways"] if w["step_s"] is not None] == ["eager"]
    assert [layer["name"] for layer in plain["layers"]][:2] == ["conv1", "pool1"]
    assert plain["limits"]["copy_bytes_s"] == 1e9
    assert not any(tmp_path.iterdir())
    assert "a run needs a folder" in tessella("train", "lenet", dataset).err
    assert "add --explain" in tessella("train", "lenet", dataset, "--race", "9").err
    assert "or auto" in tessella("train", "lenet", dataset, "--batch-size", "many").err
    settings = '{"batch_size": "auto"}'
    told = tessella("train", "lenet", dataset, "--recipe", settings, "--out", tmp_path / "run",
                    "--epochs", "0.1")  # fmt: skip
    assert told.code == 0
    assert Run(tmp_path / "run").recipe.batch_size == 4


def test_a_batch_size_that_is_no_number(dataset, tmp_path):
    with pytest.raises(UsageError, match="not an integer"):
        api.train("lenet", dataset, out=tmp_path / "run", batch_size="large")
