"""Which query learns which thing, beside Hugging Face's matchers and SciPy's least sums."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from tessella.core.errors import KernelError
from tessella.kernels.detect import assigned as kernel
from tessella.nn import zoo
from tessella.nn.zoo import matching
from tessella.nn.zoo.matching import MOST, RIGHT, Matcher, assigned, by_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)
COSTS = {"of_class": 2.0, "of_box": 5.0, "of_overlap": 2.0}


def told(counts: list[int], queries: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(len(counts))
    boxes = torch.rand(len(counts), queries, 4, generator=generator)
    outputs = {"logits": torch.randn(len(counts), queries, 7, generator=generator)}
    outputs["pred_boxes"] = torch.cat([boxes[..., :2], 0.05 + 0.4 * boxes[..., 2:]], 2)
    things = [
        {
            "class_labels": torch.randint(7, (n,), generator=generator),
            "boxes": 0.05 + 0.3 * torch.rand(n, 4, generator=generator),
        }
        for n in counts
    ]
    return outputs, things


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("counts", [[4, 0, 7], [0, 0], [12, 2]])
def test_queries_and_things_are_those_of_the_authors_matchers(counts, groups: int) -> None:
    """Also where there is no thing, and where there are more things than queries."""
    from transformers.loss.loss_lw_detr import LwDetrHungarianMatcher
    from transformers.loss.loss_rt_detr import RTDetrHungarianMatcher

    outputs, things = told(counts, 9 * groups)
    made = Matcher(**COSTS)(outputs, things, groups)
    theirs = LwDetrHungarianMatcher(class_cost=2, bbox_cost=5, giou_cost=2)
    pairs = {"LW-DETR": theirs(outputs, things, groups)}
    if groups == 1:
        config = SimpleNamespace(
            matcher_class_cost=2, matcher_bbox_cost=5, matcher_giou_cost=2, use_focal_loss=True,
            matcher_alpha=0.25, matcher_gamma=2.0,
        )  # fmt: skip
        pairs["RT-DETR"] = RTDetrHungarianMatcher(config)(outputs, things)
    for name, expected in pairs.items():
        for mine, right in zip(made, expected, strict=True):
            assert sorted(zip(*(v.tolist() for v in mine), strict=True)) == sorted(
                zip(*(v.tolist() for v in right), strict=True)
            ), name


@runs
@pytest.mark.parametrize(("things", "queries"), [(1, 1), (5, 5), (6, 40), (13, 15)])
def test_the_kernel_s_sums_are_the_least(things: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(things)
    cost = torch.randn(4, things, queries, generator=generator)
    cost[1] = torch.randint(0, 3, (things, queries), generator=generator).float()  # many are equal
    cost[2] *= 1e-3
    cost[2, 0, :2] = torch.tensor([torch.nan, torch.inf])[: min(2, queries)]
    counts = torch.tensor([things, things, max(1, things - 2), 0], dtype=torch.int32)
    found = by_kernel(cost.to(DEVICE), counts.tolist())
    assert found is not None
    judged = cost.nan_to_num(MOST, MOST, -MOST).double().numpy()
    for mine, costs, count in zip(found.cpu().numpy(), judged, counts.tolist(), strict=True):
        assert (mine[count:] == -1).all()
        assert len(set(mine[:count].tolist())) == count
        assert ((mine[:count] >= 0) & (mine[:count] < queries)).all()
        rows, columns = linear_sum_assignment(costs[:count])
        least = costs[rows, columns].sum()
        total = costs[np.arange(count), mine[:count]].sum()
        assert total <= least + 1e-4 * max(1.0, abs(least) if abs(least) < MOST / 2 else 1e3)


@runs
@pytest.mark.parametrize("wrong", ["the first thing", "one query twice", "no query", "no kernel"])
def test_a_kernel_that_is_wrong_is_told_and_not_asked_again(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    calls: list[int] = []

    def assign(costs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        calls.append(len(counts))
        if wrong == "no kernel":
            raise KernelError("a kernel could not be launched", seen="x", fix="y")
        twice = torch.zeros(3, 4, dtype=torch.int64, device=costs.device)
        apart = twice + torch.arange(4).to(twice)
        return {"one query twice": twice, "no query": apart + 9}.get(wrong, apart)

    monkeypatch.setattr(kernel, "assign", assign)
    monkeypatch.delitem(RIGHT, cost.device, raising=False)
    with pytest.warns(RuntimeWarning, match="by SciPy on the host"):
        assert by_kernel(cost, [4, 4, 4]) is None
    assert by_kernel(cost, [4, 4, 4]) is None
    assert len(calls) == 1
    RIGHT.pop(cost.device)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("d_fine_n", "loss_d_fine.DFineForObjectDetectionLoss"),
        ("rf_detr_n", "loss_lw_detr.LwDetrForObjectDetectionLoss"),
    ],
)
def test_a_network_s_loss_is_the_authors_with_our_matching(
    name: str, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matching for each layer, and one for the places that queries start from."""
    torch.manual_seed(0)
    network = zoo.build(zoo.network(name, classes=3, channels=3, size=64, answers="boxes"))
    asked: list[int] = []

    def counted(cost: torch.Tensor, counts: list[int]) -> torch.Tensor:
        asked.append(len(counts))
        return assigned(cost, counts)

    monkeypatch.setattr(matching, "assigned", counted)
    targets = torch.tensor([[[0.1, 0.1, 0.5, 0.6, 1, 0], [0.5, 0.5, 0.9, 0.9, 2, 0]]])
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        losses.append(network.train()(torch.zeros(1, 3, 64, 64), targets))
        assert len(asked) == network.network.config.decoder_layers + 1
        file, function = theirs.split(".")
        loss = importlib.import_module(f"transformers.loss.{file}")
        network.network.loss_function = getattr(loss, function)
    torch.testing.assert_close(*losses)
