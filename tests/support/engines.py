"""Engines for the server's tests: tiny, exact, slow or failing on demand."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import torch

from tessella.artifacts.outline import Manifest
from tessella.core.device import fingerprint
from tessella.core.dtype import DTYPES
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tessella.server import Repository

RECORD = Preprocess(height=8, width=8, channels=3, mean=(0.5,), std=(0.25,))
LABELS = ("daisy", "rose: red", "tulip", "x")
BATCH = DimRange(min=1, opt=4, max=8)
WEIGHT = np.random.default_rng(0).normal(size=(3 * 8 * 8, 4)).astype(np.float32)


def expected_scores(image: np.ndarray) -> np.ndarray:
    """What ``Scores`` computes, in float64."""
    return image.reshape(len(image), -1).astype(np.float64) @ WEIGHT.astype(np.float64)


class FakeEngine:
    """Has what the server needs of a loaded plan."""

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        *,
        labels: tuple[str, ...] = (),
        preprocess: Preprocess | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.labels, self.preprocess = labels, preprocess
        self.delay_s = delay_s
        self.gate: threading.Event | None = None
        self.batches: list[int] = []
        self.closed, self.device = False, torch.device("cpu")
        self.manifest = Manifest(
            fingerprint=fingerprint("cpu"),
            inputs=inputs,
            outputs=outputs,
            precision="fp32",
            preprocess=preprocess,
            preprocess_hash=preprocess.hash if preprocess else None,
            labels=labels,
            accuracy={},
            built_from="a test",
            built_with={},
            rebuild="",
            tolerance=0.0,
            members={},
        )

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        assert not self.closed, "called after close"
        assert {s.name for s in self.inputs} == set(arrays)
        for array in arrays.values():
            assert array.flags.aligned
            assert array.flags.writeable
            assert array.flags.c_contiguous
        self.batches.append(len(next(iter(arrays.values()))))
        time.sleep(self.delay_s)
        if self.gate is not None:
            assert self.gate.wait(60)
        return self.compute(**arrays)

    def compute(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class Scores(FakeEngine):
    """A linear classifier of 8×8 RGB images; fails on an image of nothing but 666."""

    def __init__(self, **settings: object) -> None:
        super().__init__(
            (TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, 8, 8)),),
            (TensorSpec(name="scores", dtype="float32", shape=(BATCH, 4)),),
            labels=LABELS,
            preprocess=RECORD,
            **settings,
        )

    def compute(self, image: np.ndarray) -> dict[str, np.ndarray]:
        if (image == 666).all(axis=(1, 2, 3)).any():
            raise RuntimeError("a kernel failed, with secrets in /home/x")
        return {"scores": image.reshape(len(image), -1) @ WEIGHT}


class Echo(FakeEngine):
    """Gives back a tensor of every element type; NumPy lacks some: torch in, torch out."""

    NAMES = tuple(DTYPES)

    def __init__(self) -> None:
        super().__init__(
            tuple(TensorSpec(name=f"in_{d}", dtype=d, shape=(BATCH, 3)) for d in self.NAMES),
            tuple(TensorSpec(name=f"out_{d}", dtype=d, shape=(BATCH, 3)) for d in self.NAMES),
        )

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            assert str(tensor.dtype) == f"torch.{name.removeprefix('in_')}"
        return {name.replace("in_", "out_"): tensor.clone() for name, tensor in tensors.items()}


class Pair(FakeEngine):
    """Two inputs, two outputs: ``total = a + b`` (INT32) and ``a`` as it came (FP32, [n, 2, 3])."""

    def __init__(self) -> None:
        super().__init__(
            (
                TensorSpec(name="a", dtype="float32", shape=(BATCH, 2, 3)),
                TensorSpec(name="b", dtype="int32", shape=(BATCH, 2, 3)),
            ),
            (
                TensorSpec(name="total", dtype="int32", shape=(BATCH, 2, 3)),
                TensorSpec(name="same", dtype="float32", shape=(BATCH, 2, 3)),
            ),
        )

    def compute(self, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        return {"total": a.astype(np.int32) + b, "same": a}


def repository(engines: dict[str, FakeEngine], **settings: object) -> Repository:
    """A repository that opens these engines instead of plans."""
    return Repository(
        {name: Path(name) for name in engines},
        open_engine=lambda path: engines[path.name],  # type: ignore[arg-type, return-value]
        **settings,
    )
