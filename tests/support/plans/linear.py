"""A small real plan, made by hand: a linear classifier of 8×8 images on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tessella.artifacts.outline import Manifest
from tessella.artifacts.plan import Plan
from tessella.artifacts.program import Bucket, Buffer, Program, Step
from tessella.core.device import fingerprint
from tessella.core.spec import DimRange, TensorSpec
from tessella.server import Doors, Placement, serve
from tests.support.engines import LABELS, RECORD, WEIGHT


def linear_plan(*, scale: float = 1.0, output: str = "scores") -> Plan:
    """``scores = scale · image.reshape(n, 192) @ WEIGHT``, with programs for batches 1, 4 and 8."""
    batch = DimRange(min=1, opt=4, max=8)
    weight = scale * torch.from_numpy(WEIGHT).T.contiguous()
    golden = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)
    return Plan(
        manifest=Manifest(
            fingerprint=fingerprint("cpu"),
            inputs=(TensorSpec(name="image", dtype="float32", shape=(batch, 3, 8, 8)),),
            outputs=(TensorSpec(name=output, dtype="float32", shape=(batch, 4)),),
            precision="fp32",
            preprocess=RECORD,
            preprocess_hash=RECORD.hash,
            labels=LABELS,
            accuracy={},
            built_from="a hand",
            built_with={},
            rebuild="make it again",
            tolerance=1e-4,
            members={},
        ),
        program=Program(
            inputs=("image",),
            outputs=(output,),
            buckets=tuple(_bucket(b, output) for b in (1, 4, 8)),
        ),
        weights={"weight": weight},
        golden={"input.image": golden, f"output.{output}": golden.reshape(1, -1) @ weight.T},
    )


def _bucket(batch: int, output: str) -> Bucket:
    return Bucket(
        batch=batch,
        buffers=(
            Buffer(name="flat", dtype="float32", shape=(batch, 192)),
            Buffer(name=output, dtype="float32", shape=(batch, 4), offset=0),
        ),
        steps=(
            Step(
                kernel="reshape.view",
                op="reshape",
                inputs=("image",),
                outputs=("flat",),
                attrs={"shape": [batch, 192]},
            ),
            Step(
                kernel="linear.aten",
                op="linear",
                inputs=("flat", "weight", None),
                outputs=(output,),
                attrs={},
            ),
        ),
        arena_bytes=128,
        held_bytes=128,
        peak_bytes=128,
    )


if __name__ == "__main__":  # a server to send signals to; prints its URL
    serve(
        {"flowers": Path(sys.argv[1])},
        folder=Path(sys.argv[1]).parent,
        port=0,
        acceptors=int(sys.argv[2]),
        doors=Doors(**json.loads(sys.argv[3])) if len(sys.argv) > 3 else Doors(),
        instances={} if len(sys.argv) > 4 else {"spread": Placement(count=2)},  # from the folder
        decode="gpu" if len(sys.argv) > 4 else "host",
        trace="OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ,
        ready=lambda url: print(url, flush=True),
    )
    print(*(name for name in sys.modules if name.startswith("opentelemetry.sdk")))
