from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tessella.compiler.passes import Request, run
from tessella.compiler.rewrites.round_weights import to_tf32
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture


def test_rounded_to_eleven_bits():
    """The reference takes numbers apart: 0.5 to 1 times a power of two, to 2048ths."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(10_000, generator=generator) * 10.0 ** torch.randint(
        -30, 30, (10_000,), generator=generator
    )
    halfway = torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11, 2**-126, 0.0, -0.0])
    numbers = torch.cat(
        [numbers, halfway, torch.tensor([float("inf"), torch.finfo(torch.float32).max])]
    )
    fraction, exponent = np.frexp(numbers.double().numpy())
    away = np.trunc(fraction * 2048 + np.copysign(0.5, fraction))
    right = np.where(np.isfinite(fraction), np.ldexp(away / 2048, exponent), numbers)
    right[-1] = torch.finfo(torch.float32).max  # rounded up it would be infinite
    assert np.array_equal(to_tf32(numbers).double().numpy(), right)


@pytest.mark.parametrize(
    ("precision", "target"), [("tf32", "sm_90"), ("tf32", "sm_75"), ("fp32", "sm_90")]
)
def test_weights_of_layers_and_nothing_else(precision, target):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
            self.tied = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(self.conv(x).mean((2, 3)))
            return self.tied(y) + self.tied.weight.sum(0)

    torch.manual_seed(0)
    module = Network().eval()
    module.conv.weight.data = module.conv.weight.data.to(memory_format=torch.channels_last)
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), 3, 8, 8))
    request = Request(target=target, precision=precision)
    made = run(capture(module, (spec,)), request, after="optimize", until="mark")
    found = {id(node["weight"]): made.constants[node["weight"]]
             for node in made.nodes if node.op in ("conv2d", "linear")}  # fmt: skip
    constants = [*found.values()]
    assert len(constants) == 3
    exact = [module.conv.weight, module.linear.weight]
    rounds = (precision, target) == ("tf32", "sm_90")  # Turing has no TF32
    for weight in exact:
        wanted = to_tf32(weight.detach()) if rounds else weight
        assert any(c.shape == wanted.shape and torch.equal(c, wanted) for c in constants)
    biases = [t for t in made.constants.values() if t.dim() == 1]
    assert any(torch.equal(t, module.conv.bias) for t in biases)
