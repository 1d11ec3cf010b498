"""The search on real digits: plans are judged again, by themselves, and times come from a table."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan, load_plan, to_bytes
from tessella.compiler import budget as budgets
from tessella.compiler.budget import Front, Labelled, mixes, search
from tessella.compiler.budget.judging import CALIBRATION_SHARE
from tessella.compiler.budget.mixes import Unit
from tessella.compiler.pipeline import optimized
from tessella.core.errors import UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture, interpret
from tessella.graph.graph import Graph
from tests.support.budgets import Table, run
from tests.support.digits import BATCH, Net

ANY = TensorSpec(name="image", dtype="float32", shape=(DimRange(min=1, opt=16, max=16), 1, 8, 8))
ABOUT = compiler.About(built_from="digits", rebuild="tessella compile digits")


@pytest.fixture(scope="module")
def fragile(net: Net) -> Net:
    """The same function, whose third layer reads one channel that is 300 times the others."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for layer in (net.left, net.right):
            layer.weight[0] *= 300
            layer.bias[0] *= 300
        net.third.weight[:, 0] /= 300
    return net


@functools.cache
def graph_of(net: nn.Module) -> Graph:
    return capture(net, (ANY,), outputs=("scores",))


def searched(net: nn.Module, data: Labelled, budget: float, cache: Path, **settings) -> Front:
    return search(
        graph_of(net), data=data, budget=budget,
        measuring=compiler.Measuring(cache=cache, budget_s=0.0),
        **{
            "target": "cpu", "batch": BATCH, "run": run, "costs": Table(), "about": ABOUT,
            **settings,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def front(fragile: Net, judging: Labelled, cache: Path) -> Front:
    return searched(fragile, judging, 0.3, cache)


def top1(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * float((scores.argmax(1) == labels).double().mean())


def layers_of(front: Front, net: nn.Module) -> dict[str, str]:
    """The precision that the chosen plan gives each module's layer."""
    exact = optimized(graph_of(net))
    point = front[front.chosen]
    return {
        node.layer: point.precisions.get(node.output.name, point.precision)
        for node in mixes.layer_nodes(exact)
    }


def test_the_chosen_plan_is_within_the_budget_and_faster_and_smaller(
    front: Front, fragile: Net, judging: Labelled, tmp_path: Path
) -> None:
    engine = runtime.load(load_plan(front.plan.save(tmp_path / "chosen.plan")))
    (judges, shown) = judging.parted()
    images, labels = judges.read(judges.places)["image"], judges.truth
    with torch.no_grad():
        right = fragile(images)
    scores = torch.from_numpy(engine(image=images.numpy())["scores"])
    assert top1(right, labels) > 90
    assert top1(scores, labels) >= top1(right, labels) - 0.3
    chosen = front[front.chosen]
    assert chosen.receipt.after == pytest.approx(top1(scores, labels) / 100)
    assert chosen.receipt.samples == len(labels) == len(judging) - len(judging) // CALIBRATION_SHARE
    assert chosen.time_us < front.exact.time_us / 1.5
    assert _weight_bytes(front.plan) < 0.6 * _weight_bytes(front.exact.plan)
    assert front.calibration.samples == len(shown)


def test_a_fragile_layer_stays_exact_and_others_do_not(front: Front, fragile: Net) -> None:
    given = layers_of(front, fragile)
    assert given["third"] in ("fp32", "bf16")
    assert list(given.values()).count("int8") >= 2
    assert "left" in given
    assert "right" not in given  # its tap is the middle one of the left's
    assert any("changes what the network says" in why for why in front.refused.values())


def test_layers_that_read_one_value_get_one_precision(net: Net, judging: Labelled) -> None:
    net = copy.deepcopy(net)
    torch.manual_seed(0)
    net.right = nn.Conv2d(16, 16, 5, 1, 2)  # which stays a layer of its own
    exact = optimized(graph_of(net))
    (_, shown) = judging.parted()
    seen = [shown.read(range(64))]
    calibration = compiler.calibrate(graph_of(net), seen, kinds=("int8",))
    name_of = {node.layer: node.output.name for node in mixes.layer_nodes(exact)}
    units = mixes.units(exact, ("fp32", "int8"), "cpu", calibration)
    assert {name_of["left"], name_of["right"]} in [{*unit.layers} for unit in units]
    assert len(units) == len(name_of) - 1


def _weight_bytes(plan: Plan) -> int:
    return sum(t.numel() * t.element_size() for t in plan.weights.values())


def test_no_point_is_dominated_and_flips_are_those_of_both_plans(
    front: Front, judging: Labelled
) -> None:
    assert len(front) >= 2
    assert [p.time_us for p in front] == sorted(p.time_us for p in front)
    for a in front:
        for b in front:
            beaten = all(x <= y for x, y in zip(a.costs, b.costs, strict=True))
            assert a is b or not beaten
    inputs, labels = judging.read(range(len(judging))), judging.labels
    before = runtime.load(front.exact.plan)(**inputs)["scores"]
    for point in front:
        after = runtime.load(point.plan)(**inputs)["scores"]
        judges = list(judging.parted()[0].places)
        flipped = [i for i in judges if before[i].argmax() != after[i].argmax()]
        assert [flip.index for flip in point.receipt.flips] == flipped
        assert point.plan.manifest.receipt is point.receipt
        for flip in point.receipt.flips:
            assert flip.path == f"digit-{flip.index}.png"
            assert flip.label == f"«{labels[flip.index]}»"
            assert flip.before == f"«{before[flip.index].argmax()}»"
            assert flip.after == f"«{after[flip.index].argmax()}»"
            assert flip.probability == pytest.approx(
                float(after[flip.index].softmax(0).max()), abs=1e-5
            )
    worst = max(front, key=lambda p: p.receipt.flipped)
    assert f"{worst.receipt.flipped} answers changed" in str(worst.plan)
    assert str(worst.receipt.flips[0]) in str(worst.plan)


def test_every_point_is_rebuilt_byte_for_byte(
    front: Front, fragile: Net, judging: Labelled, tmp_path: Path
) -> None:
    path = front.calibration.save(tmp_path / "digits.calibration")
    for number, point in enumerate(front):
        saved = point.plan.save(tmp_path / f"{number}.plan")
        again = compiler.compile_graph(
            graph_of(fragile), target="cpu", batch=BATCH, about=ABOUT, precision=point.precision,
            precisions=point.precisions, calibration=compiler.load_calibration(path),
            measuring=compiler.Measuring(lock=load_plan(saved).lock, budget_s=0.0),
        )  # fmt: skip
        assert again.manifest.precisions == point.precisions
        assert to_bytes(again).count(b"receipt") == 1
        assert _without_receipt(again) == _without_receipt(load_plan(saved))


def _without_receipt(plan: Plan) -> bytes:
    manifest = copy.copy(plan.manifest)
    object.__setattr__(manifest, "receipt", None)
    plan = copy.copy(plan)
    object.__setattr__(plan, "manifest", manifest)
    return to_bytes(plan)


def test_with_a_budget_of_zero_nothing_flips(net: Net, judging: Labelled, cache: Path) -> None:
    front = searched(net, judging, 0.0, cache)
    inputs = judging.parted()[0].read(judging.parted()[0].places)
    before, after = (
        runtime.load(p)(**inputs)["scores"].argmax(1) for p in (front.exact.plan, front.plan)
    )
    assert torch.equal(before, after)
    assert front[front.chosen].receipt.flipped == 0


def test_a_larger_budget_never_gives_a_slower_plan(
    fragile: Net, judging: Labelled, cache: Path, front: Front
) -> None:
    fronts = [searched(fragile, judging, b, cache) for b in (0.0, 0.15, 90.0)]
    times = [f[f.chosen].time_us for f in (*fronts[:2], front, *fronts[2:])]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    assert all(f[f.chosen].receipt.loss <= f.budget for f in fronts)
    assert all(f.evaluations <= 24 for f in fronts)


def test_what_is_simulated_is_what_is_built(fragile: Net, judging: Labelled, front: Front) -> None:
    exact = optimized(graph_of(fragile))
    names = [n.output.name for n in mixes.layer_nodes(exact)]
    x = {"image": judging.read(range(16))["image"]}
    for kinds in (["int8"] * 6, ["bf16", "int8", "fp32"] * 2, ["fp32", "bf16"] * 3):
        fits = compiler.layers(graph_of(fragile))
        mix = {n: k for n, k in zip(names, kinds) if k != "fp32" and n in fits}
        mix = {n: k for n, k in mix.items() if not (k == "int8" and n == names[0])}
        for target in ("cpu", "sm_90"):
            gpu = {"bf16": "fp16", "int8": "fp8" if kinds[0] == "bf16" else "int8"}
            of = {n: gpu[k] if target == "sm_90" else k for n, k in mix.items()}
            made = [
                make(exact, of, target, front.calibration)
                for make in (mixes.simulated, mixes.lowered)
            ]
            # in float32, 2e-6 apart: 16-bit products differ by the processor, and flip int8 ties
            a, b = (interpret(graph, x, upcast=torch.float32)["scores"] for graph in made)
            assert float((a - b).abs().max() / b.abs().max()) < 1e-4
            assert torch.equal(a.argmax(1), b.argmax(1))


def test_float16_that_overflows_is_refused(net: Net, judging: Labelled, cache: Path) -> None:
    net = copy.deepcopy(net)
    with torch.no_grad():
        net.second.weight *= 1e6
        net.second.bias *= 1e6
        for layer in (net.left, net.right):
            layer.weight /= 1e6
    front = searched(net, judging, 5.0, cache, least="fp16", costs=Halves())
    assert any("not finite" in why for why in front.refused.values())
    assert layers_of(front, net)["second"] == "fp32"
    assert torch.isfinite(runtime.load(front.plan)(**judging.read(range(64)))["scores"]).all()


class Halves(Table):
    def layers_us(self, precision: str, units: Sequence[Unit]) -> dict[str, float]:
        self.names = [name for unit in units for name in unit.layers]
        return dict.fromkeys(self.names, 100.0 if precision == "fp32" else 50.0)

    def total_us(self, mix: Mapping[str, str]) -> float:
        return sum(50.0 if name in mix else 100.0 for name in self.names)


def test_a_metric_of_ones_own_decides(fragile: Net, judging: Labelled, cache: Path) -> None:
    def confidence(outputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> float:
        """Of the right answer, in the mean."""
        return float(outputs["scores"].softmax(1).gather(1, labels[:, None]).mean())

    front = searched(fragile, judging, 0.2, cache, metric=confidence)
    judges = judging.parted()[0]
    before, after = (
        confidence(runtime.load(p)(**judges.read(judges.places)), judges.truth)
        for p in (front.exact.plan, front.plan)
    )
    receipt = front[front.chosen].receipt
    assert (receipt.metric, receipt.p_value) == ("confidence", None)
    assert receipt.loss == pytest.approx(100 * (before - after), abs=1e-3)
    assert receipt.low <= receipt.loss <= min(receipt.high, 0.2)
    with pytest.raises(UsageError, match="no number"):
        searched(fragile, judging, 0.2, cache, metric=lambda outputs, labels: float("nan"))


def test_it_says_what_the_samples_cannot_tell(front: Front) -> None:
    assert front.resolution > 0.3
    table = str(front)
    assert "cannot resolve a budget of 0.3 points" in table
    assert len(table.splitlines()) >= len(front) + 3
    assert table.splitlines()[1 + front.chosen].startswith("*")


def test_the_chart_has_a_point_a_plan(front: Front) -> None:
    picture = budgets.svg(front)
    extra = front.exact not in front.points
    assert picture.count("<circle") == len(front) + extra
    assert "budget: 0.3 points below float32" in picture


def test_times_are_measured_and_shared_with_the_plans(
    net: Net, judging: Labelled, tmp_path: Path
) -> None:
    """Without a table: whatever is chosen, it is no slower than float32 beside it."""
    front = searched(net, judging, 1.0, tmp_path / "own.jsonl", costs=None, least="bf16")
    assert (tmp_path / "own.jsonl").stat().st_size > 0
    assert front[front.chosen].time_us <= front.exact.time_us
    assert front[front.chosen].receipt.loss <= 1.0
    assert set(front[front.chosen].layers) <= {"fp32", "bf16"}
