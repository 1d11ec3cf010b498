"""A small detector from drawn digits to a server: every stage tells what its checkpoint tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import onnxruntime as ort
import torch
from torch import nn
from torchvision.models.detection.image_list import ImageList

from tessella import api
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.plan import Plan
from tessella.artifacts.run import Run
from tessella.data import ImportSettings, import_images
from tessella.quickstart.scattered import write_scattered
from tessella.server import Server
from tessella.tasks import Query, named

HEAD = named("detection").head


def trained(
    folder: Path, network: str, *, size: int, val: int, **recipe: Any
) -> tuple[Run, Dataset]:
    """A network after a step or two on four pictures, and its dataset."""
    train, others = write_scattered(
        folder / "pictures", count=4, val=val, size=size, most=2, sides=(24, 32), digits=(0, 1)
    )
    settings = ImportSettings(task="detection", size=size, val_folder=others)
    dataset = import_images(train, folder / "data", settings)
    return api.train(network, dataset, out=folder / "run", **recipe), dataset


def goes_the_whole_way(folder: Path, run: Run, *, least_boxes: int = 0) -> Plan:
    """Assert that ONNX file, plan and server tell what the checkpoint tells; gives the plan.

    Args:
        least_boxes: how many boxes of two pictures have to be told, so that it says something.
    """
    checkpoint: Checkpoint = api.open_checkpoint(run)
    files = sorted((folder / "pictures" / "images").iterdir())
    pixels = torch.stack([
        torch.from_numpy(checkpoint.info.preprocess(file.read_bytes())) for file in files[:2]
    ])  # fmt: skip
    right = api.eager_predictor(checkpoint)(pixels)
    assert (right[..., 4:].amax(2) > 0).sum() > least_boxes
    api.export(run, folder / "net.onnx")
    session = ort.InferenceSession(str(folder / "net.onnx"), providers=["CPUExecutionProvider"])
    (other,) = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    assert (HEAD.aligned(torch.from_numpy(other), right) - right).abs().max() < 1e-4
    path = folder / "net.plan"
    made = api.compile(run, batch=(1, 1, 2), untuned=True)
    made.save(path)
    loaded = api.load(path)
    for count in (1, 2):  # an open batch
        told = loaded(pixels[:count])[HEAD.OUTPUT]
        assert (HEAD.aligned(told, right[:count]) - right[:count]).abs().max() < 1e-4
    answer = api.answer(loaded, files[:1], query=Query(threshold=0.0))
    assert answer[0]
    with Server({"net": path}) as server, httpx.Client(base_url=server.url) as client:
        reply = client.post("/v2/models/net/detect?threshold=0", content=files[0].read_bytes())
        assert reply.json()["predictions"] == answer
    return made


def kernels_of(plan: Plan) -> list[str]:
    return [step.kernel for step in plan.program.buckets[0].steps]


def learns_from_nothing(module: nn.Module, size: int, targets: torch.Tensor) -> None:
    """Two pictures without things give every parameter of a network in training a gradient."""
    loss, overlap = module(torch.randn(2, 3, size, size), targets)
    loss.backward()
    assert loss.isfinite()
    assert overlap == 0
    assert not [name for name, p in module.named_parameters() if p.grad is None]


def has_layers_and_anchors_of(module: Any, right: Any, generator: Any) -> None:
    """For pictures of 128 pixels a side; ``right`` and ``generator`` are torchvision's."""
    own, known = module.network.state_dict(), right.state_dict()
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in known.items()}
    right.eval()
    with torch.no_grad():
        maps = list(right.backbone(torch.zeros(1, 3, 128, 128)).values())
        (anchors,) = generator(ImageList(torch.zeros(1, 3, 128, 128), [(128, 128)]), maps)
    assert torch.equal(module.anchors, anchors)
