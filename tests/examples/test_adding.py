"""What the guides in docs/ add works: a kernel, an operation, a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import tessella as ts
from examples.adding import kernel, network, operation
from tessella.core.errors import UsageError
from tessella.core.spec import TensorSpec
from tessella.kernels import catalog
from tessella.nn import zoo
from tessella.nn.zoo import standard
from tessella.nn.zoo.catalog import STANDARD
from tessella.nn.zoo.standard import ARCHITECTURES
from tessella.operations.problem import Problem
from tessella.operations.table import BY_ATEN, OPERATIONS
from tessella.operations.tensor_meta import TensorMeta
from tessella.search import find as search
from tessella.search.find import SearchOptions

CPU = torch.device("cpu")


@pytest.fixture
def row() -> Iterator[None]:
    catalog.register(kernel.ROW)
    yield
    catalog.unregister(kernel.ROW.id)


def softmax(shape: tuple[int, ...], dim: int, dtype: str = "float32") -> Problem:
    meta = TensorMeta(shape=shape, dtype=dtype)
    return Problem(op="softmax", inputs=(meta,), outputs=(meta,), attrs={"dim": dim, "dtype": None})


@pytest.mark.usefixtures("row")
def test_the_kernel_takes_part_in_the_search() -> None:
    trials = search.find(
        softmax((3, 40), -1), {}, target="cpu", options=SearchOptions(budget_s=0.01)
    )
    found = next(t for t in trials if t.kernel == kernel.ROW.id)
    assert found.refused is None
    assert found.time_us is not None


def test_the_kernel_computes_softmax() -> None:
    asked = softmax((3, 40), 1)
    x = 30 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    call, buffers = search.bind(kernel.ROW, asked, {}, CPU, {})
    exact = x.double().exp() / x.double().exp().sum(1, keepdim=True)
    torch.testing.assert_close(call(x, **buffers).double(), exact, rtol=1e-5, atol=1e-7)


def test_the_kernel_says_what_it_refuses() -> None:
    assert "last axis" in (kernel.ROW.refusal(softmax((3, 40), 0)) or "")
    assert "float16" in (kernel.ROW.refusal(softmax((3, 40), 1, "float16")) or "")


class Meeting(nn.Module):
    """Two linear layers whose results meet in the new operation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(self.left(x), self.right(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_network_with_the_operation_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    name = operation.ROW.name
    assert name not in OPERATIONS, "the guide needs another example: this operation exists by now"
    monkeypatch.setitem(OPERATIONS, name, operation.ROW)
    monkeypatch.setitem(BY_ATEN, operation.ROW.aten[0], operation.ROW)

    torch.manual_seed(0)
    module, x = Meeting().eval(), torch.randn(3, 4)
    plan = ts.compile(
        module, inputs=[TensorSpec(name="x", dtype="float32", shape=(1, 4))], batch=3, target="cpu"
    )
    assert [s.kernel for s in plan.program.buckets[0].steps if s.op == name] == ["reference"]
    with torch.no_grad():
        right = torch.log(module.left(x).double().exp() + module.right(x).double().exp())
    answer = ts.load(plan)(x=x)["output"]
    torch.testing.assert_close(answer.double(), right, rtol=1e-5, atol=1e-6)

    metas = [TensorMeta(shape=s, dtype="float32") for s in ((3, 5), (3, 4))]
    assert "do not broadcast" in (operation.ROW.misfit(metas, metas[:1], {}) or "")


def test_the_network_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STANDARD, "densenet121", network.DESCRIPTION)
    monkeypatch.setitem(ARCHITECTURES, "densenet121", network.ARCHITECTURE)
    size = network.DESCRIPTION.smallest_size
    record = zoo.network("densenet121", classes=3, channels=1, size=size)
    with torch.no_grad():
        assert zoo.build(record).eval()(torch.zeros(2, 1, size, size)).shape == (2, 3)
        with pytest.raises(UsageError, match="too small"):
            zoo.network("densenet121", classes=3, channels=1, size=size - 1)
        smaller = standard.build(record, pretrained=False).eval()
        with pytest.raises(RuntimeError, match="too small"):  # so the row says the truth
            smaller(torch.zeros(1, 1, size - 1, size - 1))
