"""The command line: one file a verb, each parses its arguments, calls the API and prints.

Only the verb in ``sys.argv`` is imported, so that ``tessella --help`` needs neither torch nor
NumPy.
"""

from __future__ import annotations

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from tessella.core.version import VERSION

# In the order in which data flows.
VERBS: dict[str, str] = {
    "quickstart": "The whole way on real digits: folder, dataset, network, plan, served.",
    "data": "Import images into a dataset: check, resize, split, count.",
    "train": "Train a network on a dataset.",
    "sweep": "Train many times to find the best settings.",
    "evaluate": "Measure a model on the test split: intervals, calibration, comparison, errors.",
    "compile": "Turn a checkpoint or an ONNX file into a plan: fused, tuned, one file.",
    "tune": "Measure a plan's kernels on this machine, and choose them again.",
    "export": "Write a checkpoint as ONNX, for other engines.",
    "verify": "Compare a plan with its checkpoint, sample by sample.",
    "run": "Answer for images, or evaluate a whole split, with a checkpoint or a plan.",
    "ask": "Keep a model open and answer pictures: JSON lines in, JSON lines out.",
    "bench": "Measure a plan's latency and throughput.",
    "profile": "Measure each step of a plan.",
    "show": "Describe a dataset, run, checkpoint, plan, or network; draw layers.",
    "diff": "Compare two plans: device, precision, steps, times, memory.",
    "serve": "Serve plans over HTTP and gRPC (Open Inference Protocol).",
    "load": "Put load on a server: latencies, goodput, open and closed loops.",
    "size": "Find how to serve a plan: the most answers a second within a p99, and the command.",
    "studio": "Open the studio: data, train, monitor, explore, plan, in the browser.",
    "kernels": "List the kernels, or find the fastest for a problem: time, workspace, error.",
    "doctor": "Check this machine: GPU, libraries, disk, what works and what to do.",
}

BEFORE_A_VERB = ("--import", "--device")  # they take a value


def main() -> None:
    """Entry point of the ``tessella`` command."""
    app = typer.Typer(
        name="tessella",
        help="From a folder of examples to a tuned, served network, on your own GPUs.\n\n"
        "Example: tessella data import flowers/ --out datasets/flowers",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    sys.argv[1:] = _in_front(sys.argv[1:])
    chosen = _verb(sys.argv[1:])
    for name, summary in VERBS.items():
        if name == chosen:
            try:
                importlib.import_module(f"tessella.cli.{name}").register(app)
            except KeyboardInterrupt:  # torch takes seconds to import: nothing has begun
                print("stopped", file=sys.stderr)
                sys.exit(130)
        else:
            app.command(name, help=summary)(_not_loaded)
    app()


def _in_front(arguments: list[str]) -> list[str]:
    """The words with the options that every verb has before it, wherever they stood."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in BEFORE_A_VERB:
            front += [word, *islice(words, 1)]
        else:
            (front if word.partition("=")[0] in BEFORE_A_VERB else rest).append(word)
    return front + rest


def _verb(arguments: list[str]) -> str | None:
    """The verb: the first word that is neither an option nor what one of them takes."""
    words = iter(arguments)
    for word in words:
        if word in BEFORE_A_VERB:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _print_version(value: bool) -> None:
    if value:
        print(f"tessella {VERSION}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="Import a module first: it defines kernels of your own."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Use this device: cpu, or a GPU by its number, cuda:1; else the first."),
    ] = None,
) -> None:
    """Takes the options that stand before a verb."""
    if device is not None:
        importlib.import_module("tessella.cli.device").choose(device)
    if modules:
        sys.path.insert(0, str(Path.cwd()))
    for module in modules or ():
        importlib.import_module(module)


def _not_loaded() -> None:
    """Stands in for a verb that is not imported, so that ``--help`` lists it."""
