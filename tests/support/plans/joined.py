"""A plan whose buffers are slices of others."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tessella.artifacts.plan import Plan
from tessella.compiler.choices import join_in_place
from tessella.core.spec import TensorSpec
from tests.support.choices import for_nothing
from tests.support.networks import build

SPEC = TensorSpec(name="image", dtype="float32", shape=(1, 4, 3, 4))


class Joined(nn.Module):
    """Two parts that are written in place, and a split of the whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x.exp(), x.tanh()], 1)
        one, two = x.split(4, 1)
        return torch.softmax(one, 1) + torch.softmax(two, 2)


@functools.cache
def subject() -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_in_place, "trials", for_nothing)
        made = build(Joined(), SPEC)
    return replace(made, program=replace(made.program, buckets=made.program.buckets[1:]))
