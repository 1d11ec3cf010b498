"""Networks with recurrent layers: compiled, saved, loaded, and compared with torch in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tessella as ts
from tessella.core.spec import TensorSpec


class Speech(nn.Module):
    """Filter banks → convolution → two bidirectional GRUs → what CTC reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(16, 24, 5, 2, 2), nn.BatchNorm1d(24), nn.ReLU())
        self.gru = nn.GRU(24, 20, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(40, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.conv(x).mT)[0]).log_softmax(-1)


class Series(nn.Module):
    """The next values of a time series."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 32, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Reader(nn.Module):
    """CRNN (https://arxiv.org/abs/1507.05717): columns of an image of text as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d((4, 1)),
        )  # fmt: skip
        self.lstm = nn.LSTM(32, 24, bidirectional=True)
        self.head = nn.Linear(48, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.conv(x).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.lstm(columns)[0]).transpose(0, 1)


class Text(nn.Module):
    """Classification by the last state of each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 12)
        self.lstm = nn.LSTM(12, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (h, _) = self.lstm(self.embedding(tokens))
        return self.head(torch.cat([h[0], h[1]], 1))


class Translator(nn.Module):
    """An encoder's last state starts the decoder, which reads the words that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 10)
        self.encoder, self.decoder = (nn.GRU(10, 14, batch_first=True) for _ in range(2))
        self.head = nn.Linear(14, 30)

    def forward(self, source: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(known), state)[0])


class Projected(nn.Module):
    """LSTMs with a projection, as large speech models have them, and an RNN."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 24, 2, batch_first=True, proj_size=6)
        self.rnn = nn.RNN(6, 7, batch_first=True, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, (h, _) = self.lstm(x)
        return self.rnn(output)[0], h.transpose(0, 1)


def floats(*shape: int) -> TensorSpec:
    return TensorSpec(name="x", dtype="float32", shape=(1, *shape))


def words(name: str, count: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="int64", shape=(1, count))


NETWORKS: dict[type[nn.Module], tuple[TensorSpec, ...]] = {
    Speech: (floats(16, 30),),
    Series: (floats(12, 6),),
    Reader: (floats(1, 16, 40),),
    Text: (words("tokens", 9),),
    Translator: (words("source", 7), words("known", 5)),
    Projected: (floats(10, 8),),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own
@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_a_plan_of_a_recurrent_network(make: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, specs = make().eval(), NETWORKS[make]
    plan = ts.compile(network, inputs=specs, batch=(1, 2, 4), target="cpu")
    plan.save(tmp_path / "net.plan")
    engine = ts.load(tmp_path / "net.plan")
    steps = [step.op for step in plan.program.buckets[0].steps if step.op in ("lstm", "gru", "rnn")]
    layers = [m for m in network.modules() if isinstance(m, nn.RNNBase)]
    assert len(steps) == sum(layer.num_layers for layer in layers)
    exact = copy.deepcopy(network).double()
    for n in (1, 3, 4, 6):
        given = {
            s.name: torch.randint(30, s.at(n)) if s.dtype == "int64" else torch.randn(s.at(n))
            for s in specs
        }
        made = engine(**{name: t.numpy() for name, t in given.items()})
        right = exact(*(t.double() if t.is_floating_point() else t for t in given.values()))
        right = right if isinstance(right, tuple) else (right,)
        for ours, theirs in zip(made.values(), right, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours).double(), theirs, rtol=1e-4, atol=1e-5)


def test_a_plan_in_bfloat16() -> None:
    torch.manual_seed(0)
    network = Series().eval()
    plan = ts.compile(network, inputs=NETWORKS[Series], batch=2, target="cpu", precision="bf16")
    x = torch.randn(2, 12, 6)
    made = ts.load(plan)(x.numpy())["output"]
    torch.testing.assert_close(torch.as_tensor(made), network(x).detach(), rtol=0.05, atol=0.02)
