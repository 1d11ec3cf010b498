"""classify: a checkpoint, a plan or an ONNX file as a function of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessella.api.checkpoints import module_of, open_checkpoint
from tessella.api.loading import load
from tessella.api.onnx_network import OnnxNetwork
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.plan import Plan
from tessella.artifacts.run import Run
from tessella.core.device import default_target, torch_device
from tessella.core.errors import ArtifactError, DataError, InputError, TessellaError, UsageError
from tessella.core.pictures import Pixels, read_pixels
from tessella.core.preprocess import (
    Preprocess,
    centre_crop,
    darkest,
    decode,
    denormalize,
    fit,
    fitted_and_size,
    in_rgb,
    normalize,
    placement,
)
from tessella.core.task import CLASSIFICATION, TaskRecord
from tessella.core.tiles import Tiles
from tessella.data.sources import is_image
from tessella.device.float32_math import float32_math
from tessella.nn.windows import over_windows
from tessella.runtime.engine import Engine
from tessella.tasks import Query, Task, View, of
from tessella.tasks.finished import finished

Model = Checkpoint | Engine | OnnxNetwork
Openable = Model | Plan | Run | str | Path  # what ``opened`` makes a model of


def open_model(path: str | Path, *, compiled: bool = True) -> Model:
    """A checkpoint (a folder, or the best of a run), a plan, or an ONNX file with its records.

    ``compiled`` as for ``load``.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(
            "there is no model here",
            seen=path,
            fix="give a run, a checkpoint, a plan or an ONNX file",
        )
    if path.suffix == ".onnx" and path.is_file():
        return OnnxNetwork.open(path)
    return load(path, compiled=compiled) if path.is_file() else open_checkpoint(path)


def opened(model: Openable) -> Model:
    """A model as it is; a plan's engine; a run's best checkpoint; or what lies at a path, as
    ``open_model`` says.
    """
    if isinstance(model, str | Path):
        return open_model(model)
    if isinstance(model, Plan):
        return load(model)
    return open_checkpoint(model) if isinstance(model, Run) else model


def predictor(
    model: Model, *, trust_code: bool = False
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Preprocess, tuple[str, ...]]:
    """A model as a function of images, with its preprocessing record and its labels.

    A model of volumes takes whole ones, of any size.
    """
    predict, record, labels = _predictor(model, trust_code=trust_code)
    return whole(predict, record), record, labels


def whole(
    predict: Callable[[torch.Tensor], torch.Tensor], record: Preprocess
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of the record's inputs as one of whole volumes, if it is of volumes."""
    if record.volume is None:
        return predict
    return lambda images: over_windows(predict, images, record.sides, outside=darkest(record))


def _predictor(
    model: Model, *, trust_code: bool
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Preprocess, tuple[str, ...]]:
    if isinstance(model, Checkpoint):
        info = model.info
        return eager_predictor(model, trust_code=trust_code), info.preprocess, info.labels
    if isinstance(model, OnnxNetwork):
        return model, model.preprocess, model.labels
    if model.preprocess is None:
        raise UsageError(
            "this plan does not say how images become its input",
            seen=", ".join(str(s) for s in model.inputs),
            fix="compile it from a checkpoint, or call the engine with arrays",
        )
    return engine_predictor(model), model.preprocess, model.labels


def eager_predictor(
    checkpoint: Checkpoint, *, trust_code: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checkpoint's network in plain torch, on the GPU where there is one; answers on the CPU.

    The scores are a reference: float32 products are IEEE, where torch would let cuDNN round them
    to TF32.
    """
    device = torch_device(default_target())
    task = checkpoint.info.task
    module = module_of(checkpoint, trust_code=trust_code)
    module = finished(module, of(task).head, task.numbers).to(device)

    def predict(images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), float32_math("ieee"):
            scores: torch.Tensor = module(images.to(device))
        return scores.float().cpu()

    return predict


def engine_predictor(engine: Engine) -> Callable[[torch.Tensor], torch.Tensor]:
    """An engine as a function from normalized images to its first output."""
    (image,), (scores, *_) = engine.inputs, engine.outputs
    record = engine.preprocess if image.dtype == "uint8" else None

    def predict(images: torch.Tensor) -> torch.Tensor:
        array = images.numpy()
        if record is not None:  # the plan scales them itself
            array = denormalize(array, record)
        return torch.from_numpy(engine(**{image.name: array})[scores.name])

    return predict


def task_of(model: Model) -> tuple[Task, TaskRecord]:
    """A model's task, and the record of it."""
    if isinstance(model, OnnxNetwork):
        record = model.task
    else:
        record = model.info.task if isinstance(model, Checkpoint) else model.manifest.task
    return of(record), record


def name_of(model: Model) -> str:
    """What a report calls a model: its file or folder, or what a plan was built from."""
    return model.manifest.built_from if isinstance(model, Engine) else str(model.path)


def pictures(
    paths: Sequence[str | Path], *, is_one: Callable[[str], object] = is_image
) -> list[Path]:
    """The image files that are meant: files as they are, folders' and lists' in their place.

    Args:
        paths: image files; folders, whose files that end like an image are taken, those of
            subfolders too, in the order of their names; lists (``.txt``) of a path a line, relative
            to the list, with what follows a tab left out.
        is_one: by a file's name, whether it is one of those that are taken of a folder.

    Raises:
        DataError: a folder or list names no image, or a list cannot be read.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if is_one(str(p)) and p.is_file())
        elif path.suffix == ".txt":
            inside = [path.parent / line for line in _lines(path)]
        else:
            inside = [path]
        if not inside:
            raise DataError("there are no images here", seen=path, fix="give image files")
        found += inside
    return found


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("the list of images cannot be read", seen=f"{path}: {error}") from error
    return [name for line in lines if (name := line.split("\t")[0].strip())]


def answer(
    model: Openable,
    images: Sequence[str | Path],
    *,
    query: Query | None = None,
    tiles: Tiles | None = None,
    trust_code: bool = False,
) -> list[Any]:
    """The answer to each image file, as the model's task gives it to a client of a server: JSON.

    With ``tiles`` a large picture is cut, and the answers to its tiles become one: of boxes and
    masks. A tile should be as large as those from which the network learned.

    Raises:
        DataError: a file is no image, or not there; ``answer_each`` goes on behind it.
    """
    answers = []
    for _, told in answer_each(model, images, query=query, tiles=tiles, trust_code=trust_code):
        if isinstance(told, TessellaError):
            raise told
        answers.append(told)
    return answers


def answer_each(
    model: Openable,
    images: Sequence[str | Path],
    *,
    query: Query | None = None,
    tiles: Tiles | None = None,
    trust_code: bool = False,
) -> Iterator[tuple[Path, Any]]:
    """Each image file with its answer, or with the error that says why it has none."""
    model = opened(model)
    predict, record, labels = predictor(model, trust_code=trust_code)
    task, about = task_of(model)
    if record.volume is not None:
        raise UsageError(
            "the model is of volumes, and not of pictures",
            seen=", ".join(map(str, images))[:200],
            fix="call segment(), or tessella run MODEL volume.nii.gz --out labels.nii.gz",
        )
    if tiles is not None and task.tiles is None:
        raise UsageError(
            "answers without a place cannot be joined", seen=task.title, fix="leave tiles out"
        )
    for path in map(Path, images):
        try:
            if tiles is not None:
                whole = decode(_content(path), record, name=path.name)
                told = _of_tiles(predict, whole, tiles, record, task, (labels, about), query)
                yield path, told
                continue
            pixels, view = seen(_content(path), record, name=path.name)
        except (DataError, InputError) as error:
            yield path, error
            continue
        outputs = predict(torch.from_numpy(pixels[None])).float().numpy()
        asked = replace(query or Query(), views=(view,))
        (told,) = task.answers.answer(outputs, labels, about, asked)
        yield path, told


def _of_tiles(
    predict: Callable[[torch.Tensor], torch.Tensor], pixels: Pixels, tiles: Tiles,
    record: Preprocess, task: Task, about: tuple[tuple[str, ...], TaskRecord],
    query: Query | None,
) -> Any:  # fmt: skip
    """The answer to a picture, HWC in the record's channels and depth, of which each tile is as
    large as what the network sees."""
    assert task.tiles is not None, "only answers with a place are joined"
    _, height, width = record.input_shape
    whole = replace(record, height=height, width=width, crop=None)
    if placement(tiles.height, tiles.width, whole).box != (0, 0, tiles.width, tiles.height):
        raise UsageError(
            f"a network whose pictures were fitted by {record.resize!r} sees no whole tile of "
            "this shape",
            seen=f"{tiles.height} × {tiles.width}, its input {height} × {width}",
            fix="take tiles of the shape of its input",
        )

    def outputs() -> Iterator[tuple[int, int, npt.NDArray[Any]]]:
        for top, left, part in tiles.parts(pixels):
            image = normalize(fit(part, whole), whole)
            yield top, left, predict(torch.from_numpy(image[None])).float().numpy()

    view = View(height=tiles.height, width=tiles.width, record=whole)
    size = (pixels.shape[0], pixels.shape[1])
    return task.tiles.joined(outputs(), tiles, size, view, about, query or Query())


def seen(content: bytes, record: Preprocess, *, name: str) -> tuple[npt.NDArray[np.float32], View]:
    """An image file as the network's input, CHW; and where the network saw the picture.

    Raises:
        DataError: the bytes are not an image that can be decoded.
    """
    fitted, (height, width) = fitted_and_size(content, record, name=name)
    pixels = normalize(centre_crop(fitted, record), record)
    return pixels, View(height=height, width=width, record=record)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError("there is no image here", seen=path) from error
    except OSError as error:
        raise DataError("the image cannot be read", seen=f"{path}: {error.strerror}") from error


def plain_answer(task: Task, answer: Any) -> dict[str, Any]:
    """An image's answer in the JSON of a terminal: of a classification labels and probabilities."""
    if task.name == CLASSIFICATION.name:
        return {"top": [{"label": a["label"], "score": a["probability"]} for a in answer]}
    return {"answer": answer}


def drawn(model: Model, image: str | Path, answer: Any) -> Pixels | None:
    """An image file, HWC RGB of 8 bits, with its answer drawn; None where there is nothing to draw.

    Raises:
        DataError: the file is no image, or not there.
    """
    task, _ = task_of(model)
    path = Path(image)
    return task.answers.drawn(in_rgb(read_pixels(_content(path), name=path.name)), answer)


def classify(
    model: Model, images: Sequence[str | Path], *, top: int = 5, trust_code: bool = False
) -> list[list[tuple[str, float]]]:
    """The ``top`` labels of each image file with their probabilities.

    Raises:
        UsageError: the model does not classify; ``answer`` is for every task.
    """
    task, _ = task_of(model)
    if task.answers.VERB != "classify":
        raise UsageError("the model does not classify", seen=task.title, fix="call answer()")
    told = answer(model, images, query=Query(top=top), trust_code=trust_code)
    return [[(str(a["label"]), a["probability"]) for a in one] for one in told]
