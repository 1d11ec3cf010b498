"""``tessella show``: an artifact, the known networks, a network, its passes, or its layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella import api, tasks
from tessella.artifacts.checkpoint import Checkpoint, Network
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_atomic
from tessella.artifacts.plan import load_plan
from tessella.artifacts.run import Run
from tessella.cli.output import Events, Json, Output, grid, output
from tessella.cli.parsing import parse_sides
from tessella.cli.tables import checkpoint_table, dataset_table, run_table
from tessella.core.errors import UsageError
from tessella.core.record import to_plain
from tessella.core.spec import TensorSpec
from tessella.nn import inspect, zoo
from tessella.tasks import named

if TYPE_CHECKING:
    from tessella.compiler import PassRecord


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    what: Annotated[
        str,
        Argument(help="A path; or `networks`; or `network NAME`; or `layers CHECKPOINT`."),
    ],
    name: Annotated[str | None, Argument(help="The network, or the checkpoint.")] = None,
    image: Annotated[Path | None, Option(help="layers: the image that goes through.")] = None,
    out: Annotated[Path | None, Option(help="layers: folder for pictures and layers.json.")] = None,
    classes: Annotated[int, Option(help="network: number of outputs.")] = 1000,
    channels: Annotated[int | None, Option(help="network: channels of the input.")] = None,
    size: Annotated[str | None, Option(help="network: height x width of the input.")] = None,
    svg: Annotated[Path | None, Option(help="network or plan: write a drawing here.")] = None,
    passes: Annotated[
        bool, Option("--passes", help="What the compiler does to it (checkpoint, ONNX, network).")
    ] = False,
    texts: Annotated[
        bool, Option("--graph", help="passes: the graph's lines that each pass changed.")
    ] = False,
    precision: Annotated[str, Option(help="passes: fp32, tf32, bf16 or fp16.")] = "fp32",
    target: Annotated[
        str | None, Option(help="plan: its program for this target, not the one for this machine.")
    ] = None,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Describe a dataset, run, checkpoint or plan; list or draw networks; picture layers.

    Example: tessella show runs/flowers · tessella show network resnet50 --svg resnet50.svg
    · tessella show --passes resnet50 --graph
    """
    with output(json_only=json, events=events) as out_:
        if texts and not passes:
            raise UsageError("--graph is of --passes", fix=f"tessella show --passes {what} --graph")
        if passes:
            of = _given(name, "a network's name") if what == "network" else what
            records = _explained(of, classes, channels, size, precision, trust_code)
            _passes(out_, records, texts, title=f"{of}, {precision}")
        elif what == "networks":
            _networks(out_)
        elif what == "network":
            _network(out_, _given(name, "a network's name"), classes, channels, size, svg)
        elif what.endswith(".prototxt"):
            _network(out_, what, classes, channels, size, svg)
        elif what == "layers":
            checkpoint = api.open_checkpoint(_given(name, "a checkpoint's path"))
            _layers(out_, checkpoint, image, out, trust_code)
        else:
            _path(out_, Path(what), target)


def _given(name: str | None, expected: str) -> str:
    if name is None:
        raise UsageError(f"{expected} is missing", fix="see tessella show --help")
    return name


def _path(out: Output, path: Path, target: str | None) -> None:
    """Describe the artifact at ``path``, whose kind its files tell."""
    if path.suffix == ".onnx" and path.is_file():
        raise UsageError(
            "this file is a network, and no plan", seen=path, fix=f"tessella show --passes {path}"
        )
    if path.is_file():
        plan = load_plan(path, target=target)
        plain = {"plan": str(path), "targets": list(plan.targets), **to_plain(plan.manifest)}
        out.result(plain, str(plan))
    elif (path / "dataset.json").exists():
        dataset = Dataset(path, deep=False)
        out.result({"dataset": str(path), **to_plain(dataset.info)}, dataset_table(dataset))
    elif (path / "run.json").exists():
        run = Run(path)
        plain = {
            "run": str(path),
            **to_plain(run.info),
            "checkpoints": [{"path": str(c.path), **c.info.metrics} for c in run.checkpoints()],
            "metrics": [to_plain(m) for m in run.metrics()],
        }
        out.result(plain, run_table(run))
    elif (path / "checkpoint.json").exists():
        checkpoint = Checkpoint(path)
        plain = {"checkpoint": str(path), **to_plain(checkpoint.info)}
        out.result(plain, checkpoint_table(checkpoint))
    else:
        raise UsageError(
            "nothing of ours lies here",
            seen=path,
            fix="give a dataset, a run, a checkpoint or a plan; or `networks`, `network NAME`",
        )


def _networks(out: Output) -> None:
    by_task = {task: named(task).head.ANSWERS for task in tasks.names()}
    rows, plain = list[tuple[object, ...]](), list[dict[str, Any]]()
    for answers, networks in zoo.ANSWERING.items():
        learns = [task for task, asked in by_task.items() if asked == answers]
        for name, d in networks.items():
            side = f"{d.size}×{d.size}×{d.channels}"
            rows.append((name, d.title, str(d.year), side, d.smallest_size, ", ".join(learns)))
            plain.append({"name": name, "tasks": learns, **to_plain(d)})
    table = grid(("network", "", "year", "usual input", "smallest", "for"), rows)
    out.result({"networks": plain}, table)
    out.note("and every timm name as timm/NAME, your own as file.py:Class, Caffe's net.prototxt")


def _network(
    out: Output,
    name: str,
    classes: int,
    channels: int | None,
    size: str | None,
    svg: Path | None,
) -> None:
    """A network as a table of layers, and as a drawing."""
    network, module = _built(name, classes, channels, size)
    shape = (network.channels, *network.sides)
    summary = inspect.summary(module, shape)
    plain: dict[str, Any] = {"network": to_plain(network), **to_plain(summary)}
    if svg is not None:
        write_atomic(svg, api.network_svg(module, shape, name=name).encode())
        plain["svg"] = str(svg)
    table = grid(
        ("layer", "type", "output", "parameters", "MACs"),
        [
            (r.name, r.type, "×".join(map(str, r.output_shape)), r.parameters, r.macs)
            for r in summary.rows
        ],
        title=f"{name}: {summary.parameters:,} parameters, {summary.macs:,} MACs an image",
    )
    out.result(plain, table)


def _built(
    name: str, classes: int, channels: int | None, size: str | None
) -> tuple[Network, torch.nn.Module]:
    """A network of the zoo with weights that nobody trained."""
    network = zoo.network(
        name,
        classes=classes,
        channels=channels,
        size=None if size is None else parse_sides(size),
        answers=zoo.answering(name),
    )
    return network, zoo.build(network).eval()


def _explained(
    what: str, classes: int, channels: int | None, size: str | None, precision: str, trust: bool
) -> tuple[PassRecord, ...]:
    """The passes on the path in ``what``, or on the network of that name."""
    path = Path(what)
    if path.is_dir() or path.suffix == ".onnx" or (path.is_file() and path.suffix == ".plan"):
        return api.explain(path, precision=precision, trust_code=trust)
    network, module = _built(what, classes, channels, size)
    shape = (1, network.channels, *network.sides)
    image = TensorSpec(name="image", dtype="float32", shape=shape)
    return api.explain(module, precision=precision, inputs=(image,))


def _passes(out: Output, records: tuple[PassRecord, ...], texts: bool, title: str) -> None:
    """A row for each pass; with ``texts`` also the lines of the graph that the pass changed."""
    rows = [(r.name, r.rewrites, r.nodes_before, r.nodes_after, r.why) for r in records]
    table = grid(("pass", "rewrites", "nodes", "after", "why"), rows, title=title)
    diffs = [Text(r.diff) for r in records if texts and r.diff]
    plain = [{**to_plain(r), "diff": r.diff} for r in records]
    out.result({"passes": plain}, Group(table, *diffs))


def _layers(
    out: Output, checkpoint: Checkpoint, image: Path | None, folder: Path | None, trust_code: bool
) -> None:
    if image is None or folder is None:
        raise UsageError("show layers needs --image and --out", fix="see tessella show --help")
    if not image.is_file():
        raise UsageError("there is no image here", seen=image)
    pixels = checkpoint.info.preprocess(image.read_bytes(), name=image.name)
    module = zoo.load(checkpoint, trust_code=trust_code)
    report = inspect.write_views(module, torch.from_numpy(pixels[None]), folder)
    rows = [
        (v.name, v.type, "×".join(map(str, v.output_shape)), v.parameters,
         v.activation.mean if v.activation else None,
         v.activation.std if v.activation else None)
        for v in report.layers
    ]  # fmt: skip
    head = ("layer", "type", "output", "parameters", "mean", "std")
    out.result(to_plain(report), grid(head, rows, title=f"{image.name}, pictures in {folder}"))
