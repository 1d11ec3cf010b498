from __future__ import annotations

import resource
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run, Solver
from tessella.core.errors import DataError, OutOfMemory, TrainError, UsageError
from tessella.core.events import Event
from tessella.core.policies import Policy
from tessella.data import ImportSettings
from tessella.data.importing import import_images
from tessella.data.loading import batches
from tessella.nn import zoo
from tessella.quickstart.classification import write_digits
from tessella.training import loop, trainer
from tessella.training.evaluate import predict_split
from tessella.training.loop import train
from tessella.training.prepare import check
from tessella.training.solver import set_rate
from tests.support.training import (
    CLASSES,
    PREPROCESS,
    cramp,
    curve,
    evaluate,
    losses,
    losses_by_hand,
    recipe,
    tell_late,
    write_dataset,
)


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    return train(recipe(dataset), tmp_path_factory.mktemp("run") / "run")


def test_learns(run):
    assert losses(run)[-1] < 0.3 * losses(run)[0]
    assert run.best().info.metrics["val/accuracy"] > 0.9


def test_equals_a_loop_written_by_hand(run):
    assert losses(run) == pytest.approx(losses_by_hand(run), rel=1e-5)


def test_networks_have_the_curves_of_a_plain_loop(tmp_path):
    """LeNet on handwritten digits, and a ResNet-18 on generated pictures of 32×32."""
    write_digits(tmp_path / "pictures")
    for file in (tmp_path / "pictures").rglob("*.png"):
        if int(file.stem) >= 150:
            file.unlink()
    settings = ImportSettings(size=28, channels=1, holdout=0.5, workers=1)
    digits = import_images(tmp_path / "pictures", tmp_path / "digits", settings)
    made = write_dataset(tmp_path / "stripes", train=30, size=32)
    for network, path in (("lenet", digits.path), ("resnet18", made)):
        how = recipe(path, network=network, epochs=1.0, val_interval=9)
        found = losses(train(how, tmp_path / network))
        assert found == pytest.approx(losses_by_hand(Run(tmp_path / network)), rel=1e-5)
        assert len(found) > 2


def _batch(dataset, *, epoch, start):
    stream = batches(
        Dataset(dataset).train,
        PREPROCESS,
        batch_size=10,
        seed=7,
        epoch=epoch,
        start=start,
        rank=0,
        world=1,
        augment=recipe(dataset).augment,
        training=True,
        workers=0,
    )
    return next(iter(stream))


def test_checkpoints_hold_what_was_measured_on_their_weights(dataset, run):
    checkpoint = run.best()
    module = zoo.load(checkpoint)
    with torch.no_grad():
        found = evaluate(module, Dataset(dataset).val, batch_size=10)
    assert found.accuracy == checkpoint.info.metrics["val/accuracy"]
    assert found.loss == pytest.approx(checkpoint.info.metrics["val/loss"], rel=1e-6)
    assert checkpoint.info.preprocess == PREPROCESS
    assert checkpoint.info.labels == CLASSES
    assert checkpoint.info.dataset_hash == Dataset(dataset).info.content_hash


def test_learning_rate_follows_the_policy(dataset, tmp_path):
    policy = Policy(name="step", steps=4, gamma=0.5)
    found = train(recipe(dataset, policy=policy, val_interval=9), tmp_path / "run")
    rates = [m.values["lr"] for m in found.metrics()]
    assert rates == pytest.approx(np.repeat([0.01, 0.005, 0.0025, 0.00125], 4))


def test_keeps_the_newest_and_the_best(dataset, tmp_path, monkeypatch):
    accuracies = iter([0.2, 0.9, 0.5, 0.4, 0.3, 0.6])
    _pretend(monkeypatch, accuracies)
    found = train(recipe(dataset, epochs=6, keep_last=2), tmp_path / "run")
    assert [c.info.position.step for c in found.checkpoints()] == [8, 20, 24]
    assert found.best().info.position.step == 8


def test_the_best_is_kept_between_snapshots(dataset, tmp_path, monkeypatch):
    _pretend(monkeypatch, iter([0.2, 0.9, 0.5, 0.4]))
    settings = recipe(dataset, snapshot_interval=99, keep_last=1)
    found = train(settings, tmp_path / "run")
    assert [c.info.position.step for c in found.checkpoints()] == [8, 16]
    assert found.best().info.metrics["val/accuracy"] == 0.9


def test_a_checkpoint_between_validations_claims_no_accuracy(dataset, tmp_path):
    settings = recipe(dataset, snapshot_interval=0.25, val_interval=1, keep_last=99)
    for checkpoint in train(settings, tmp_path / "run").checkpoints():
        measured = checkpoint.info.position.step % 4 == 0
        assert ("val/accuracy" in checkpoint.info.metrics) is measured


def test_an_epoch_begins_while_the_one_before_ends(dataset, tmp_path, monkeypatch):
    """Its images are loaded during the last steps and the validation of the one before."""
    told = []

    def begun(*given, training, epoch=0, **rest):
        told.append(f"load {epoch}")
        return batches(*given, training=training, epoch=epoch, **rest)

    def validated(*given, **rest):
        told.append("validate")
        return predict_split(*given, **rest)

    # a GPU's losses come in groups, and its batches are asked for one ahead
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loop, "batches", begun)
    monkeypatch.setattr(loop, "predict_split", validated)
    run = train(recipe(dataset, epochs=2.0, workers=1), tmp_path / "run", emit=told_step(told))
    one_by_one = [f"step {n}" for n in range(1, 9)]
    assert [word for word in told if word.startswith("step")] == one_by_one
    at = {word: told.index(word) for word in told}
    assert at["load 0"] < at["step 1"]
    assert at["step 2"] < at["load 1"] < at["step 4"] < at["validate"] < at["step 5"]
    assert len(losses(run)) == 8


def told_step(told):
    def emit(event):
        if event.kind == "metric" and "loss" in event.values:
            told.append(f"step {event.step}")

    return emit


def test_stops_early(dataset, tmp_path, monkeypatch):
    _pretend(monkeypatch, iter([0.5, 0.6, 0.6, 0.55]))
    found = train(recipe(dataset, epochs=9, patience=2), tmp_path / "run")
    assert found.latest().info.position.step == 16
    result = found.events()[-1]
    assert (result.kind, result.values["early"]) == ("result", True)
    # and a resume does not go on
    train(recipe(dataset, epochs=9, patience=2), tmp_path / "run", resume=True)
    assert found.latest().info.position.step == 16


def _pretend(monkeypatch, accuracies):
    """Validations that give these accuracies."""
    measure = loop.measure

    def pretended(*args):
        found = measure(*args)
        return type(found)(**{**vars(found), "accuracy": next(accuracies)})

    monkeypatch.setattr(loop, "measure", pretended)


def test_trains_without_a_validation_split(tmp_path):
    bare = write_dataset(tmp_path / "bare", train=20)
    found = train(recipe(bare), tmp_path / "run")
    assert set(found.latest().info.metrics) == {"train/loss", "train/accuracy"}
    assert any("no validation split" in e.text for e in found.events() if e.kind == "warning")
    with pytest.raises(UsageError, match="early stopping needs a validation split"):
        train(recipe(bare, patience=3), tmp_path / "other")


def test_train_loss_is_the_mean_since_the_last_validation(run):
    measured = run.metrics()
    assert measured[7].values["train/loss"] == pytest.approx(np.mean(losses(run)[4:8]))


def test_balanced_weights_are_used(tmp_path):
    skewed = write_dataset(
        tmp_path / "skewed", train=20, val=6, labels=[0] * 14 + [1] * 4 + [2] * 2
    )
    plain = train(recipe(skewed, batch_size=20), tmp_path / "plain")
    weighted = train(recipe(skewed, batch_size=20, class_weights="balanced"), tmp_path / "weighted")
    torch.manual_seed(7)
    module = zoo.build(plain.info.network)
    split = Dataset(skewed).train
    images = torch.from_numpy(np.stack([PREPROCESS(e.content) for e in split]))
    each = nn.functional.cross_entropy(
        module(images), torch.from_numpy(split.labels.copy()), reduction="none"
    )
    factor = torch.tensor([20 / 42] * 14 + [20 / 12] * 4 + [20 / 6] * 2)
    assert losses(plain)[0] == pytest.approx(each.mean().item(), rel=1e-5)
    assert losses(weighted)[0] == pytest.approx((each * factor).mean().item(), rel=1e-5)


def test_starts_from_a_checkpoint(dataset, run, tmp_path):
    tuned = train(recipe(dataset, init=str(run.latest().path)), tmp_path / "run")
    assert losses(tuned)[0] < 0.5 * losses(run)[0]
    other = write_dataset(tmp_path / "two", train=20, val=6, classes=("rows", "columns"))
    told = train(recipe(other, init=str(run.latest().path)), tmp_path / "other").events()
    (note,) = (e for e in told if e.kind == "warning")
    assert note.values.keys() == {"fc2.weight", "fc2.bias"}
    with pytest.raises(UsageError, match=r"cannot start.*init=pretraind.*say random, pretrained"):
        train(recipe(dataset, init="pretraind"), tmp_path / "wrong")
    with pytest.raises(UsageError, match=rf"one of its checkpoints: {run.latest().path}"):
        train(recipe(dataset, init=str(run.path)), tmp_path / "wrong")
    check(recipe(dataset, init="gone"))  # which who resumes does not read


def test_divergence_names_the_step_and_stays_in_the_log(dataset, tmp_path):
    settings = recipe(dataset, solver=Solver(lr=1e6))
    told = []
    with pytest.raises(
        TrainError, match=r"diverged.*rate.*weights are not finite.*lower the learning rate"
    ):
        train(settings, tmp_path / "run", emit=told.append)
    assert told[-1].kind == "error"
    assert loop.Run(tmp_path / "run").events()[-1].text == told[-1].text


def test_a_loss_that_is_told_late_is_looked_for_in_its_own_images(dataset, tmp_path, monkeypatch):
    looked = []
    tell_late(monkeypatch)
    monkeypatch.setattr(
        loop.Trainer, "where_not_finite", lambda _, batch: looked.append(batch.indices)
    )
    settings = recipe(dataset, epochs=8, val_interval=9, snapshot_interval=9, solver=Solver(lr=1e6))
    with pytest.raises(TrainError, match=r"the loss is \S+ at step \d+:") as caught:
        train(settings, tmp_path / "run")
    step = int(caught.value.wrong.split("at step ")[1].split(":")[0])
    assert 1 < step < 16  # before the last of those that were told together
    of_step = _batch(dataset, epoch=(step - 1) // 4, start=(step - 1) % 4)
    assert [given.tolist() for given in looked] == [of_step.indices.tolist()]


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_a_readable_error(dataset, tmp_path):
    """Files end at 100 kB, of which LeNet's weights have more: a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(TrainError, match=r"step-0.*File too large.*make room.*then resume"):
            train(recipe(dataset), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not Run(tmp_path / "run").checkpoints()
    assert len(losses(train(recipe(dataset), tmp_path / "run", resume=True))) == 16


def test_a_full_disk_is_a_readable_error(dataset, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.EventLog, "sync", full)
    told = []
    with pytest.raises(TrainError, match=r"No space left on device.*then resume"):
        train(recipe(dataset), tmp_path / "run", emit=told.append)
    assert told[-1].kind == "error"
    monkeypatch.undo()
    assert len(losses(train(recipe(dataset), tmp_path / "run", resume=True))) == 16


def test_out_of_memory_answers_with_a_batch_that_fits(dataset, tmp_path, monkeypatch):
    cramp(monkeypatch)
    with pytest.raises(OutOfMemory, match=r"step of 10 images.*--batch-size 2"):
        train(recipe(dataset), tmp_path / "run")


def test_what_a_step_will_take_is_told_before_it(dataset, tmp_path, monkeypatch):
    told: list[Event] = []
    monkeypatch.setattr(loop, "free_bytes", lambda device: 1)
    train(recipe(dataset, batch_size=80, epochs=1), tmp_path / "large", emit=told.append)
    few, often = [event.text for event in told if event.kind == "warning"][:2]
    assert "are free in the host" in few
    assert f"shows each of the {len(Dataset(dataset).train)} that there are for training" in often
    monkeypatch.setattr(loop, "host_bytes", lambda: 1)  # no step begins that cannot end
    monkeypatch.setattr(loop.Training, "_step", None)
    with pytest.raises(OutOfMemory, match=r"step of 10 images does not fit in the host's memory"):
        train(recipe(dataset), tmp_path / "none")


def test_labels_outside_the_classes_are_refused_before_training(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path / "data", train=6, val=3)
    labels = Dataset(folder).train.labels.copy()
    labels[4] = 7
    monkeypatch.setattr(loop.Dataset, "train", property(lambda d: _relabelled(d, labels)))
    with pytest.raises(DataError, match=r"row 4 has the label 7, 3 classes"):
        train(recipe(folder), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def _relabelled(dataset, labels):
    split = dataset.split("train")
    split.column = pa.chunked_array([labels])
    return split


def test_tensorboard_files_hold_the_curve(run):
    board = EventAccumulator(str(run.path / "tensorboard"))
    board.Reload()
    assert [e.value for e in board.Scalars("loss")] == pytest.approx(losses(run))
    assert [e.step for e in board.Scalars("val/accuracy")] == [4, 8, 12, 16]


def test_events_tell_the_story(run):
    events = run.events()
    assert [e.name for e in events if e.kind == "phase"] == ["way", "train", *["snapshot"] * 4]
    assert events[-1].values["best_accuracy"] == run.best().info.metrics["val/accuracy"]
    assert curve(run)[-1][1] == 4.0


def test_each_step_has_the_momentum_of_its_policy(dataset, tmp_path, monkeypatch):
    used = []

    def noted(optimizer, rate, momentum):
        set_rate(optimizer, rate, momentum)
        used.extend({group["momentum"] for group in optimizer.param_groups})

    monkeypatch.setattr(trainer, "set_rate", noted)
    policy = Policy(name="onecycle", warmup=0.5)
    train(recipe(dataset, epochs=2, policy=policy), tmp_path / "run")
    assert used == [policy.momentum(0.9, done / 8) for done in range(8)]


def test_labels_are_smoothed_in_training_only(dataset, tmp_path):
    settings = recipe(dataset, epochs=0.25, solver=Solver(lr=1e-12), val_interval=0.25)
    plain = train(settings, tmp_path / "plain").latest().info.metrics
    smooth = train(replace(settings, label_smoothing=0.9), tmp_path / "smooth").latest()
    assert smooth.info.metrics["train/loss"] != plain["train/loss"]
    assert smooth.info.metrics["val/loss"] == plain["val/loss"]
