"""The measures of multilabel and regression beside scikit-learn's."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn import metrics

from tessella.core.task import TaskRecord
from tessella.tasks import LossSettings, Query, named

MULTI, NUMBERS = named("multilabel"), named("regression")


def labelled(truth_NK: np.ndarray):
    column = pa.chunked_array([[np.flatnonzero(row).tolist() for row in truth_NK]])
    return MULTI.examples.targets(column.cast(pa.list_(pa.int64())), truth_NK.shape[1])


@pytest.mark.parametrize(
    ("task", "kind", "column"),
    [
        ("classification", pa.int64(), [2, 0, 2, 1]),
        ("multilabel", pa.list_(pa.int64()), [[0, 2], [], [2], [1, 2], []]),
        (
            "segmentation",
            named("segmentation").examples.column(),
            [{"mask": b"", "classes": k} for k in ([0, 2], [], [1], [1, 2])],
        ),
        ("regression", pa.list_(pa.float64()), [[1, None, 0], [None, None, 2], [0, 0, None]]),
    ],
)
def test_the_images_of_a_class_are_those_in_which_it_occurs(task, kind, column):
    examples = named(task).examples
    split = pa.chunked_array([pa.array(column[:2], kind), pa.array(column[2:], kind)])
    column = [
        [float("nan") if v is None else v for v in t] if task == "regression" else t for t in column
    ]
    for label in range(3):
        expected = [i for i, target in enumerate(column) if label in examples.occurs(target)]
        assert examples.targets(split, 3).having(label).tolist() == expected


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("classification", 3), ("classification", -1), ("multilabel", None), ("multilabel", [None]),
        ("multilabel", [3]), ("multilabel", [-1]), ("regression", None), ("regression", [1.0]),
        ("regression", [1.0] * 4), ("regression", [1.0, float("inf"), 2.0]),
        ("regression", [1.0, 1e39, 2.0]),
    ],
)  # fmt: skip
def test_targets_that_no_import_writes_are_refused(task, row):
    examples = named(task).examples
    column = pa.chunked_array([pa.array([row], examples.column())])
    with pytest.raises(ValueError, match=r"row|label|number"):
        examples.targets(column, 3)


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_and_f1_are_scikit_learns(ties):
    rng = np.random.default_rng(0)
    truth = rng.random((400, 7)) < np.linspace(0.02, 0.9, 7)
    scores = (rng.normal(size=truth.shape) + 1.5 * truth).astype(np.float32)
    if ties:
        scores = np.round(scores * 2) / 2
    truth[:, 3] = False  # a class that never occurs
    found = MULTI.metrics.measure(scores, labelled(truth), tuple("abcdefg"))
    known = [k for k in range(7) if k != 3]
    for k in known:
        report = found.classes[k]
        ap = metrics.average_precision_score(truth[:, k], scores[:, k])
        assert report.average_precision == pytest.approx(ap, abs=1e-12)
        precision, recall, _ = metrics.precision_recall_curve(truth[:, k], scores[:, k])
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        assert report.f1 == pytest.approx(f1.max(), abs=1e-12)
        # the threshold that is kept gives this F1 again
        shown = 1 / (1 + np.exp(-scores[:, k].astype(np.float64))) >= report.threshold
        assert metrics.f1_score(truth[:, k], shown) == pytest.approx(report.f1, abs=1e-12)
        assert report.f1_at_half == pytest.approx(metrics.f1_score(truth[:, k], scores[:, k] >= 0))
    assert found.map == pytest.approx(
        metrics.average_precision_score(truth[:, known], scores[:, known], average="macro")
    )
    assert found.classes[3].average_precision is None
    cuts = np.array(found.numbers["threshold"])
    shown = 1 / (1 + np.exp(-scores.astype(np.float64))) >= cuts
    assert found.exact == pytest.approx(metrics.accuracy_score(truth, shown))
    assert found.loss == pytest.approx(
        torch.nn.functional.binary_cross_entropy_with_logits(
            torch.from_numpy(scores).double(), torch.from_numpy(truth).double()
        ).item()
    )


def test_rare_labels_weigh_more_and_a_batch_is_the_mean_of_its_parts():
    logits, targets = torch.randn(6, 3), torch.randint(0, 2, (6, 3)).float()
    weights = MULTI.loss.balanced([30, 0, 90], 100)
    assert weights.tolist() == pytest.approx([70 / 30, 1.0, 10 / 90])
    settings = LossSettings(weights_K=weights, smoothing=0.2)
    soft = targets.double() * 0.8 + 0.1
    p = torch.sigmoid(logits.double())
    by_hand = -(weights.double() * soft * p.log() + (1 - soft) * (1 - p).log()).mean()
    whole = MULTI.loss.loss(logits, targets, settings)
    assert whole.item() == pytest.approx(by_hand.item(), rel=1e-6)
    halves = [MULTI.loss.loss(logits[h], targets[h], settings) for h in (slice(3), slice(3, 6))]
    assert whole.item() == pytest.approx(torch.stack(halves).mean().item(), rel=1e-6)


def test_answers_name_what_reaches_its_threshold():
    record = TaskRecord(name="multilabel", score="map", numbers={"threshold": (0.5, 0.9, 0.1)})
    scores = np.array([[1.0, 2.0, -1.0], [-3.0, -3.0, -3.0]], np.float32)
    answer = MULTI.answers.answer
    said = answer(scores, ("a", "b", "c"), record, Query())
    assert [[a["label"] for a in one] for one in said] == [["a", "c"], []]
    top = answer(scores, ("a", "b", "c"), record, Query(top=1))
    assert [(a["label"], a["present"]) for one in top for a in one] == [("b", False), ("a", False)]
    low = answer(scores, ("a", "b", "c"), record, Query(threshold=0.04))
    assert [len(one) for one in low] == [3, 3]
    probability = said[0][0]["probability"]
    assert probability == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item())


def test_regression_measures_are_scikit_learns():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(300, 3)) * (1, 10, 1e-3) + (0, 500, 0)
    answers = (truth + rng.normal(size=truth.shape) * (0.3, 2, 1e-3)).astype(np.float32)
    truth[5:50, 1] = np.nan
    column = pa.chunked_array([truth.tolist()])
    found = NUMBERS.metrics.measure(answers, NUMBERS.examples.targets(column, 3), ("x", "y", "z"))
    for k in range(3):
        known = ~np.isnan(truth[:, k])
        pair = truth[known, k], answers[known, k].astype(np.float64)
        report = found.classes[k]
        assert report.r2 == pytest.approx(metrics.r2_score(*pair))
        assert report.mae == pytest.approx(metrics.mean_absolute_error(*pair))
        assert report.rmse == pytest.approx(metrics.root_mean_squared_error(*pair))
    assert found.r2 == pytest.approx(np.mean([c.r2 for c in found.classes]))


def test_a_missing_number_is_said_to_be_unknown():
    values = (1.5, float("nan"), None)
    assert NUMBERS.answers.truth(values, ("x", "y", "z")) == "x 1.5, y unknown, z unknown"


def test_missing_numbers_count_nothing_and_units_come_back():
    values = [[1.0, float("nan")], [3.0, 100.0], [5.0, 300.0]]
    targets = NUMBERS.examples.targets(pa.chunked_array([values]), 2)
    numbers = NUMBERS.loss.numbers(targets, 2)
    assert numbers["mean"] == (3.0, 200.0)
    assert numbers["std"] == pytest.approx((np.std([1, 3, 5]), 100.0))
    batch = torch.from_numpy(targets.batch(np.arange(3)))
    outputs = torch.tensor([[0.0, 9.0], [0.0, -1.0], [0.0, 3.0]], requires_grad=True)
    loss = NUMBERS.loss.loss(outputs, batch, LossSettings(numbers=numbers))
    loss.backward()
    assert outputs.grad[0, 1] == 0  # unknown, so nothing is learned from it
    assert outputs.grad[1, 1] == 0  # right
    finished = NUMBERS.head.finish(torch.tensor([[1.0, -1.0]]), numbers)
    assert finished[0].tolist() == pytest.approx([3 + np.std([1, 3, 5]), 100.0])


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "segmentation"])
def test_the_losses_of_images_are_torchs_and_their_mean_is_the_reports(task):
    """Of a segmentation they are the last of the rows, whose mean the report gives."""
    rng, part = np.random.default_rng(0), named(task)
    rows = rng.normal(size=(30, 4)).astype(np.float32)
    kinds = {
        "classification": rng.integers(0, 4, 30).tolist(),
        "multilabel": [np.flatnonzero(r).tolist() for r in rng.random((30, 4)) < 0.4],
        "regression": rng.normal(size=(30, 4)).tolist(),
        "segmentation": [{"mask": b"", "classes": []}] * 30,
    }
    column = pa.chunked_array([pa.array(kinds[task], part.examples.column())])
    targets = part.examples.targets(column, 4)
    if task == "segmentation":
        rows = np.concatenate([np.ones((30, 12)), rng.random((30, 1))], 1).astype(np.float32)
    found = part.metrics.losses(rows, targets, part.record(), 4)
    labels = ("a", "b", "c", "d")
    report = part.metrics.measure(rows, targets, labels)
    assert found.shape == (30,)
    assert found.mean() == pytest.approx(report.values["loss"], rel=1e-6)
    scores = torch.from_numpy(rows).double()
    functional = torch.nn.functional
    if task == "classification":
        theirs = functional.cross_entropy(scores, torch.tensor(kinds[task]), reduction="none")
        np.testing.assert_allclose(found, theirs, rtol=1e-6)
    if task == "multilabel":
        hot = torch.from_numpy(targets.batch(np.arange(30))).double()
        theirs = functional.binary_cross_entropy_with_logits(scores, hot, reduction="none")
        np.testing.assert_allclose(found, theirs.mean(1), rtol=1e-6)


@pytest.mark.parametrize("task", ["segmentation", "volumes"])
def test_draws_are_measured_as_the_images_that_they_name(task):
    """Sums of what each image counts give what measuring so many copies of it gives."""
    measure, rng, labels = named(task).metrics.measure, np.random.default_rng(5), ("a", "b", "c")
    rows = rng.integers(0, 50, (12, 10)).astype(np.float32)
    rows[:, :3] = rows[:, :6].reshape(12, 2, 3).min(axis=1)  # in common: no more than said
    rows[:, 6:9] = np.maximum(rows[:, 6:9], rows[:, :3])
    rows[:, 2::3][3:, :3] = 0  # the last class is in three images alone
    drawn = rng.multinomial(12, [1 / 12] * 12, size=4)
    drawn[0, :3] = 0
    again = measure(rows, None, labels).resampled(drawn.T.astype(np.float64))
    for number, counts in enumerate(drawn):
        whole = measure(np.repeat(rows, counts, axis=0), None, labels)
        assert set(again) == set(whole.values)
        for name, value in whole.values.items():
            assert again[name][number] == pytest.approx(value, rel=1e-12), name
    assert measure(rows, None, labels).classes[2].iou is not None
    assert measure(rows[3:], None, labels).classes[2].iou is None


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_a_draw_of_weights_is_the_measure_of_its_images(task):
    """Equal scores, classes and numbers that a draw lacks, images without any, numbers that never
    vary, or that lie far from all others in a draw."""
    rng, labels = np.random.default_rng(7), ("a", "b", "c", "d")
    count, draws = 40, 24
    scores = rng.normal(size=(count, 4)).round(1).astype(np.float32)  # with ties
    drawn = rng.multinomial(count, [1 / count] * count, size=draws)
    drawn[:6, :3] = 0  # the class c lies in the first three alone
    drawn[6:9, 3:] = 0
    drawn[6:9, 3] = 1
    if task == "multilabel":
        truth = rng.random((count, 4)) < [0.3, 0.7, 0.0, 0.0]
        truth[:3, 2] = True
    else:
        truth = (scores + rng.normal(size=(count, 4))).astype(np.float32).astype(np.float64)
        truth[rng.random((count, 4)) < 0.2] = np.nan
        truth[3:, 2] = np.nan
        truth[:, 3] = 2.5
        truth[:2, 3] = 1e6, 1e6 + 1 / 3  # far away
        drawn[9:12] = np.arange(count) < 2
        scores[:5, 3] = truth[:5, 3]

    def measured(chosen):
        if task == "multilabel":
            targets = labelled(truth[chosen])
        else:
            rows = pa.array(truth[chosen].tolist(), NUMBERS.examples.column())
            targets = NUMBERS.examples.targets(pa.chunked_array([rows]), 4)
        return named(task).metrics.measure(scores[chosen], targets, labels)

    whole = measured(np.arange(count))
    assert "resampled" not in whole.to_json()
    there = [c for c in whole.classes if c.support]
    assert len(there) == (3 if task == "multilabel" else 4)
    for name in ("f1", "f1_at_half") if task == "multilabel" else ("r2", "mae"):
        assert getattr(whole, name) == pytest.approx(np.mean([getattr(c, name) for c in there]))
    again = whole.resampled(drawn.T.astype(np.float64))
    for number, counts in enumerate(drawn):
        one = measured(np.repeat(np.arange(count), counts))
        assert set(again) == set(one.values)
        for name, value in one.values.items():
            assert again[name][number] == pytest.approx(value, rel=1e-12, abs=1e-12), name
