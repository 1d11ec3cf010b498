"""CenterNet's loss of a whole batch beside its definition, thing by thing in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou, generalized_box_iou

from tessella.nn.zoo.centernet import BOX_WEIGHT, SPREAD, loss

ROWS, COLUMNS, CLASSES = 12, 16, 3
TARGETS = torch.tensor(
    [
        # two that overlap, of which the smaller owns what they share
        [[0.1, 0.1, 0.7, 0.8, 0, 0], [0.3, 0.3, 0.5, 0.6, 2, 0], [0, 0, 0, 0, -1, 0]],
        # one smaller than a place, one that fills the picture, and a crowd
        [[0.51, 0.52, 0.53, 0.55, 1, 0], [0.0, 0.0, 1.0, 1.0, 0, 0], [0.6, 0.1, 0.9, 0.4, 1, 1]],
        [[0, 0, 0, 0, -1, 0]] * 3,  # nothing
        [[0.2, 0.2, 0.6, 0.6, 0, 1], [0, 0, 0, 0, -1, 0], [0, 0, 0, 0, -1, 0]],  # a crowd alone
    ],
    dtype=torch.float64,
)


def defined(centres: Tensor, kinds: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
    """The same, place by place as the papers have it."""
    focal, weights, losses, overlaps = torch.zeros(()).double(), [], [], []
    count = 0
    for picture, rows in enumerate(targets.tolist()):
        things = [r for r in rows if r[4] >= 0 and not r[5]]
        crowds = [r for r in rows if r[5]]
        count += len(things)
        shares: list[dict[int, float]] = [{} for _ in things]
        owner: dict[int, int] = {}
        for place in range(ROWS * COLUMNS):
            x, y = (place % COLUMNS + 0.5) / COLUMNS, (place // COLUMNS + 0.5) / ROWS
            wanted, mine = 0.0, []
            for number, (x0, y0, x1, y1, _, _) in enumerate(things):
                off = []
                near = True
                for at, low, high, cells in ((x, x0, x1, COLUMNS), (y, y0, y1, ROWS)):
                    middle = min(math.floor((low + high) / 2 * cells), cells - 1) + 0.5
                    off.append(6 * (at * cells - middle) / (SPREAD * (high - low) * cells + 1))
                    near &= abs(at - (low + high) / 2) <= SPREAD * (high - low) / 2
                bell = math.exp(-(off[0] ** 2 + off[1] ** 2) / 2)
                wanted = max(wanted, bell)
                if near or bell > 1 - 1e-4:
                    shares[number][place] = bell
                    mine.append(((x1 - x0) * (y1 - y0), number))
            if mine:
                owner[place] = min(mine)[1]
            p = centres[picture].flatten()[place].sigmoid()
            if wanted > 1 - 1e-4:
                focal = focal - (1 - p) ** 2 * p.log()
            elif not any(r[0] <= x <= r[2] and r[1] <= y <= r[3] for r in crowds):
                focal = focal - (1 - wanted) ** 4 * p**2 * (1 - p).log()
        for place, number in owner.items():
            truth = torch.tensor([things[number][:4]]).double()
            box, kind = boxes[picture, place][None], int(things[number][4])
            weights.append(shares[number][place] / sum(shares[number].values()))
            wrong = F.cross_entropy(kinds[picture, place], torch.tensor(kind))
            losses.append(wrong + BOX_WEIGHT * (1 - generalized_box_iou(box, truth)[0, 0]))
            overlaps.append(box_iou(box, truth)[0, 0].detach())
    total = focal / max(1, count)
    if not weights:
        return torch.stack([total, torch.zeros(()).double()])
    weight = torch.tensor(weights).double() / sum(weights)
    apart, common = torch.stack(losses), torch.stack(overlaps)
    return torch.stack([total + (weight * apart).sum(), (weight * common).sum()])


def test_the_loss_of_a_batch_is_that_of_its_things() -> None:
    """Values and gradients; of pictures with nothing, too; and one graph for torch.compile."""
    torch.manual_seed(0)
    places = ROWS * COLUMNS
    corners = torch.rand(len(TARGETS), places, 2, 2, dtype=torch.float64).sort(2).values
    given = [
        torch.randn(len(TARGETS), ROWS, COLUMNS, dtype=torch.float64),
        torch.randn(len(TARGETS), places, CLASSES, dtype=torch.float64),
        corners.flatten(2),
    ]
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    rowless = TARGETS[:, :0]
    asked = [(p, TARGETS) for p in (slice(None), slice(2, 3), slice(3, 4))]
    for pictures, targets in (*asked, (slice(None), rowless)):
        found = []
        for call in (defined, loss, compiled):
            leaves = [tensor[pictures].clone().requires_grad_() for tensor in given]
            made = call(*leaves, targets[pictures])
            made[0].backward()
            gradients = [torch.zeros(()) if g is None else g for g in (t.grad for t in leaves)]
            found.append([made.detach(), *(g.expand_as(t) for g, t in zip(gradients, leaves))])
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-9, check_dtype=False)
