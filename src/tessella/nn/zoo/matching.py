"""Which query of D-FINE and RF-DETR learns which thing: the matching of the least cost, as Hugging
Face's matchers have it, on the device where the answers are.

Theirs compares the queries of all pictures with the things of all, waits for the costs on the host,
and calls SciPy for each picture and group of queries: with 16 pictures of 8 things 12 ms of a step
of D-FINE-S, and 90 of RF-DETR-S, which has thirteen groups.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import pad_sequence

from tessella.core.errors import KernelError
from tessella.nn.zoo.boxes import iou_and_giou

ALPHA, GAMMA, LEAST = 0.25, 2.0, 1e-8  # of the focal cost, as both networks' authors have it

MAX_QUERIES = 4096  # of a problem on a GPU: a block holds so many numbers of each kind
MOST = 1e9  # of a cost
RIGHT: dict[torch.device, bool] = {}  # whether the kernel's first answer was of the least cost

Pairs = list[tuple[Tensor, Tensor]]  # of each picture: queries, and the things that they learn


class Matcher(nn.Module):
    """The matching of the least cost between queries and things, of each picture.

    Args:
        of_class, of_box, of_overlap: what the parts of a cost weigh: the focal cost of the thing's
            class, the distance of the four numbers of boxes, and −1 times their generalized
            overlap.

    Source: Carion et al., End-to-end object detection with transformers, arXiv:2005.12872.
    """

    def __init__(self, *, of_class: float, of_box: float, of_overlap: float) -> None:
        super().__init__()
        self.weights = of_class, of_box, of_overlap

    @torch.no_grad()
    @_disable_dynamo  # as torch.compiler.disable, which imports torch's compiler at once: 1.4 s
    def forward(
        self,
        outputs: Mapping[str, Tensor],
        targets: Sequence[Mapping[str, Tensor]],
        group_detr: int = 1,
    ) -> Pairs:
        """Queries and things of each picture; each group of queries learns every thing.

        Args:
            outputs: ``logits`` [N, Q, classes] and ``pred_boxes`` [N, Q, 4], middle and sides.
            targets: of each picture ``class_labels`` [M] and ``boxes`` [M, 4].
            group_detr: how many groups of queries there are, one behind another.
        """
        groups, counts = group_detr, [len(of["boxes"]) for of in targets]
        cost_NTQ = self._costs(outputs, targets)
        images, things, queries = cost_NTQ.shape
        each = queries // groups
        cost_PTQ = cost_NTQ.reshape(images, things, groups, each).transpose(1, 2).flatten(0, 1)
        query_PT = assigned(cost_PTQ, [n for n in counts for _ in range(groups)])
        query_NGT = query_PT.reshape(images, groups, things)
        first_G1 = torch.arange(groups, device=cost_PTQ.device)[:, None] * each
        pairs = []
        for query_GT, count in zip(query_NGT, counts, strict=True):
            query = (query_GT[:, :count] + first_G1).flatten()
            thing = torch.arange(count, device=query.device).repeat(groups)
            if count > each:  # some things of each group have no query
                kept = (query_GT[:, :count] >= 0).flatten()
                query, thing = query[kept], thing[kept]
            pairs.append((query, thing))
        return pairs

    def _costs(
        self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """The cost of each thing and query, [N, T, Q]: T is the most things of a picture."""
        labels_NT = pad_sequence([of["class_labels"] for of in targets], batch_first=True)
        boxes_NT4 = pad_sequence([of["boxes"].float() for of in targets], batch_first=True)
        chance_NKQ = outputs["logits"].float().sigmoid().transpose(1, 2)
        place_NTQ = labels_NT[:, :, None].expand(-1, -1, chance_NKQ.shape[2])
        p = chance_NKQ.gather(1, place_NTQ)
        right = ALPHA * (1 - p) ** GAMMA * -(p + LEAST).log()
        wrong = (1 - ALPHA) * p**GAMMA * -(1 - p + LEAST).log()
        there, told = boxes_NT4[:, :, None], outputs["pred_boxes"].float()[:, None]
        apart = (there - told).abs().sum(3)
        overlap = iou_and_giou(_corners(there), _corners(told))[1]
        of_class, of_box, of_overlap = self.weights
        return of_class * (right - wrong) + of_box * apart - of_overlap * overlap


def _corners(boxes: Tensor) -> Tensor:
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([middle - half, middle + half], -1)


def assigned(cost_PTQ: Tensor, counts: Sequence[int]) -> Tensor:
    """The query of each thing of some problems, int64 [P, T], so that the sum of costs is least; −1
    of a thing that has none."""
    if cost_PTQ.is_cuda and max(counts, default=0) <= cost_PTQ.shape[2] <= MAX_QUERIES:
        found = by_kernel(cost_PTQ, counts)
        if found is not None:
            return found
    return on_host(cost_PTQ, counts)


def on_host(cost_PTQ: Tensor, counts: Sequence[int]) -> Tensor:
    # 0.6 s of the processor to import, and only trainings of detectors match
    from scipy.optimize import linear_sum_assignment

    costs = _finite(cost_PTQ).double().cpu().numpy()
    found = torch.full(cost_PTQ.shape[:2], -1, dtype=torch.int64)
    for place, (cost_TQ, count) in enumerate(zip(costs, counts, strict=True)):
        things, queries = linear_sum_assignment(cost_TQ[:count])
        found[place, torch.from_numpy(things)] = torch.from_numpy(queries)
    return found.to(cost_PTQ.device)


def by_kernel(cost_PTQ: Tensor, counts: Sequence[int]) -> Tensor | None:
    """As our kernel has it; None on a device where its first answer was not of the least cost.

    An H200 matches 208 problems of 8 things and 300 queries in 0.42 ms, SciPy on its host in 47.
    """
    device = cost_PTQ.device
    if RIGHT.get(device) is False:
        return None
    kernel = importlib.import_module("tessella.kernels.detect.assigned")  # it brings Triton
    numbers = torch.tensor(counts, dtype=torch.int32, device=device)
    try:
        found: Tensor = kernel.assign(_finite(cost_PTQ), numbers)
    except KernelError as error:
        _tell(device, str(error))
        return None
    if device not in RIGHT and max(counts, default=0):
        right = on_host(cost_PTQ, counts)
        apart = (_sums(cost_PTQ, found) - _sums(cost_PTQ, right)).abs()
        alike = apart <= 1e-3 * (1 + _sums(cost_PTQ.abs(), right))
        alike &= (found < cost_PTQ.shape[2]).all(1)
        if not alike.all() or not torch.equal(found >= 0, right >= 0) or _twice(found):
            _tell(device, f"a sum of costs is off by {float(apart.max()):.3g}")
            return None
        RIGHT[device] = True
    return found


def _tell(device: torch.device, why: str) -> None:
    """Say once that the host matches what the device should have."""
    RIGHT[device] = False
    warnings.warn(
        f"queries are matched by SciPy on the host, which is slower: on {device} our kernel does "
        f"not match them. Seen: {why[:200]}",
        RuntimeWarning,
        stacklevel=2,
    )


def _finite(cost_PTQ: Tensor) -> Tensor:
    """Costs; one that is no number, or infinite, is taken last."""
    return cost_PTQ.nan_to_num(MOST, MOST, -MOST).clamp(-MOST, MOST)


def _sums(cost_PTQ: Tensor, query_PT: Tensor) -> Tensor:
    """What each problem's queries cost."""
    place_PT = query_PT.clamp(0, cost_PTQ.shape[2] - 1)  # one outside would end a GPU's context
    chosen = _finite(cost_PTQ).double().gather(2, place_PT[:, :, None])[:, :, 0]
    return torch.where(query_PT >= 0, chosen, 0.0).sum(1)


def _twice(query_PT: Tensor) -> bool:
    """Whether a query has two things."""
    order = query_PT.sort(1).values
    return bool(((order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)).any())


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function that finds other things under some names of its module; the function
    itself where it uses none of these."""
    code = getattr(function, "__code__", None)
    if code is None or not set(names) <= set(code.co_names):
        return function
    # without the module's name, by which torch.compile would find what the module has
    known = {k: v for k, v in function.__globals__.items() if k != "__name__"}
    made = types.FunctionType(code, {**known, **names}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
