"""A compile request as one record, for the command line, Python, jobs and a plan's ``rebuild``.

Each field is an option of ``tessella compile`` and a keyword argument of ``tessella.compile``. The
record checks that the fields go together, before torch is imported or a file is opened.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tessella.artifacts.checkpoint import QUANTIZED
from tessella.artifacts.files import require_place
from tessella.core.architectures import GPU_TARGETS, TARGETS
from tessella.core.dtype import PRECISIONS, plain_precision
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.record import canonical_json, from_plain, parse_json
from tessella.core.spec import DimRange, TensorSpec

Input = Literal["float32", "uint8"]  # what an image is when a plan gets it
ROUNDED = ("int8", "fp8")  # what needs a calibration
METHODS = ("min-max", "percentile", "entropy", "mse")
NETWORKS = ("lenet", "alexnet", "googlenet", "vgg16", "resnet18", "resnet50", "resnet152")
ALWAYS_WRITTEN = ("target", "precision", "batch")  # even where they have their default
# Fields that say how a build runs and where its results go; they do not change the plan.
NOT_REBUILT = ("out", "cache", "lock", "time_limit_s", "chart", "front")
NOT_MEASURED = ("cache", "lock", "time_limit_s", "budget")  # what belongs to a measurement


def option(help: str, *spellings: str, default: Any = None) -> Any:
    """A field with its option's help text and further spellings."""
    return field(default=default, metadata={"help": help, "spellings": spellings})


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Everything that ``tessella compile`` can be asked for; the help of an option is its meaning.

    A text in angle brackets, as ``<Net>``, stands for an object of a Python program: such a request
    has no command, and ``rebuild`` says so.

    Raises:
        UsageError: a value that cannot be, or values that do not go together.
    """

    source: str = field(
        metadata={
            "help": "A checkpoint, a run (its best), model.onnx, file.py:NAME, net.prototxt, or a"
            " network's name."
        }
    )
    out: str | None = option("The plan file to write.")
    target: str | None = option(
        f"cpu, {', '.join(GPU_TARGETS)} or reference, or several, as cpu,sm_80; else what this"
        " machine has. One that is not here is built --untuned."
    )
    precision: str = option(
        "fp32, tf32, bf16, fp16, or with a calibration int8, fp8.", default="fp32"
    )
    batch: tuple[int, ...] = option(
        "One size, or smallest,usual,largest: 1,8,32 is usual.", default=(1, 8, 32)
    )
    precisions: dict[str, str] | None = option(
        "NAME=PRECISION of a layer, by its result in show --passes --graph; repeatable.", "--layer"
    )
    budget: float | None = option(
        "Points of accuracy, map or miou to lose at most: each layer's precision is chosen."
    )
    data: str | None = option("budget: the dataset that judges.")
    front: str | None = option("budget: write all plans of the table into this folder, too.")
    chart: str | None = option("budget: draw accuracy, time, bytes as SVG.")
    point: int | None = option("budget: write this plan of the table, not the chosen one.")
    calibration: str | None = option(
        "A dataset, or a saved calibration, for int8 and fp8.", "--calibrate"
    )
    calibration_split: str | None = option(
        "calibration: of this split, not of train.", "--calibrate-split"
    )
    calibration_samples: int | None = option(
        "calibration: about so many images, not 512.", "--calibrate-samples"
    )
    calibration_method: str | None = option(
        "calibration: min-max, percentile, entropy or mse (the default).", "--calibrate-method"
    )
    inputs: tuple[TensorSpec, ...] = option(
        "NAME:DTYPE:1x3x224x224 of an input of file.py:NAME or of a network, or of a model.onnx"
        " that leaves sizes open; repeatable.",
        default=(),
    )
    input: Input = option(
        "uint8: take images as bytes; the plan scales them itself.", default="float32"
    )
    preprocess: Preprocess | None = option(
        "How images become the input, as JSON or a file of it; a checkpoint says so itself."
    )
    lock: str | None = option("A plan: decide as it did, measure nothing, same bytes.")
    cache: str | None = option("Timing cache, read and added to.")
    time_limit_s: float | None = option(
        "Seconds to measure; the next build with this cache goes on.", "--time-limit"
    )
    untuned: bool = option(
        "Measure nothing: a cost model chooses, for a machine that is not here. See tune.",
        default=False,
    )
    trust_code: bool = option("Run the Python that a checkpoint brings.", default=False)
    imports: tuple[str, ...] = option(  # stands before the verb
        "Import a module first: it defines kernels of your own.", default=()
    )

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise UsageError(
                "this is nothing that can be compiled",
                seen=f"{type(self.source).__name__} {self.source!r}"[:200],
                fix="give a checkpoint, a run, a torch module, or the path of an ONNX file",
            )
        if not self.source.strip():
            raise UsageError("a source has a name", seen=repr(self.source), fix="name a checkpoint")
        self._require_targets()
        _require_one_of(self.precision, tuple(PRECISIONS), "unknown precision")
        _require_one_of(self.input, get_args(Input), "unknown kind of input")
        _require_one_of(self.calibration_method, (*METHODS, None), "unknown method of calibration")
        span_of(self.batch)
        for name, precision in (self.precisions or {}).items():
            if plain_precision(precision) not in PRECISIONS or precision.startswith("tf32"):
                raise UsageError(
                    "this is no precision of a single layer",
                    seen=f"{precision} for {name}",
                    fix=f"use {', '.join(p for p in PRECISIONS if p != 'tf32')}",
                )
        if self.calibration_samples is not None and self.calibration_samples < 1:
            raise UsageError(
                "a calibration needs samples", seen=self.calibration_samples, fix="give 1 or more"
            )
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise UsageError("a time limit is seconds, more than 0", seen=self.time_limit_s)
        self._require_budget()
        self._require_calibration()
        if self.untuned:
            self._refuse_measuring()

    def _require_targets(self) -> None:
        for target in self.targets:
            _require_one_of(target, TARGETS, "unknown target")
        several = len(self.targets) > 1
        if several and (len(set(self.targets)) < len(self.targets) or "reference" in self.targets):
            raise UsageError(
                "several targets are a CPU and GPUs, each once", seen=self.target, fix="cpu,sm_80"
            )
        if several and self.budget is not None:
            raise UsageError(
                "a budget is spent by measuring on one machine",
                seen=f"targets {self.target}",
                fix="give one target",
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """What the plan gets a program for; none: what this machine has."""
        return tuple(self.target.split(",")) if self.target is not None else ()

    def _refuse_measuring(self) -> None:
        """Refuse what an untuned plan cannot have, as nothing is measured."""
        if given := [n for n in NOT_MEASURED if getattr(self, n) is not None]:
            raise UsageError(
                "a plan that is untuned measures nothing",
                seen=", ".join(map(option_name, given)),
                fix="leave it out, or --untuned",
            )
        if self.target == "reference":
            raise UsageError("the target reference is never tuned", fix="leave out --untuned")

    def _require_budget(self) -> None:
        """Check the fields that a budget needs, and refuse those that a budget replaces."""
        if self.budget is None:
            lonely = ("data", "chart", "front", "point")
            if given := [option_name(n) for n in lonely if getattr(self, n) is not None]:
                raise UsageError("this belongs to --budget", seen=", ".join(given), fix="give it")
            return
        if not 0 <= self.budget < 100:
            raise UsageError(
                "a budget is percentage points of the task's score",
                seen=self.budget,
                fix="0 to 100",
            )
        if self.data is None:
            raise UsageError(
                "a budget needs labelled data, which judges the plans", fix="give --data, data="
            )
        if self.precisions or self.lock:
            raise UsageError(
                "a budget chooses the precisions of the layers itself, by measuring",
                seen=", ".join(n for n in ("precisions", "lock") if getattr(self, n)),
                fix="leave it out",
            )
        if self.point is not None and self.point < 0:
            raise UsageError("the table has no such point", seen=self.point, fix="count from 0")

    def _require_calibration(self) -> None:
        used = {self.precision, *map(plain_precision, (self.precisions or {}).values())}
        lacking = self.calibration is None and self.budget is None
        if lacking and used & set(ROUNDED) and not _rounds(self.source):
            raise UsageError(
                f"{' and '.join(sorted(used & set(ROUNDED)))} needs a calibration",
                seen="none",
                fix="give calibration=, or --calibrate DATASET, or choose another precision",
            )
        if self.calibration is None:
            self._refuse_details("no calibration")

    def _refuse_details(self, seen: str) -> None:
        """Refuse a split, samples or a method of calibration where no dataset calibrates."""
        details = (self.calibration_split, self.calibration_samples, self.calibration_method)
        if any(d is not None for d in details):
            raise UsageError(
                "a split, samples and a method of calibration belong to a dataset",
                seen=seen,
                fix="give --calibrate DATASET",
            )

    @property
    def span(self) -> DimRange:
        """The batch as a range."""
        return span_of(self.batch)

    def require_files(self) -> None:
        """Check that the files that the request names exist, and that the plan can be written,
        before anything is loaded.

        Raises:
            UsageError, ArtifactError: a file is missing, or is of the wrong kind.
        """
        if self.out is not None and Path(self.out).is_dir():
            raise UsageError(
                "a plan is a file", seen=f"the folder {self.out}", fix=f"{self.out}/net.plan"
            )
        if self.out is not None:
            require_place(Path(self.out))
            self._require_other(Path(self.out))
        if not in_memory(self.source):
            _require_source(self.source)
        for name in ("calibration", "data"):
            given = getattr(self, name)
            if given is not None and not in_memory(given) and not Path(given).exists():
                raise ArtifactError(
                    "there is no dataset here",
                    seen=f"{option_name(name)} {given}",
                    fix="give its path",
                )
        if self.lock is not None and not in_memory(self.lock) and not Path(self.lock).is_file():
            raise UsageError("there is no lock here", seen=self.lock, fix="give a plan or its lock")
        if Path(self.calibration or "").is_file():
            self._refuse_details(f"the saved calibration {self.calibration}")

    def _require_other(self, out: Path) -> None:
        """Refuse a plan that would be written over what it is made of."""
        for given in (self.source, self.data, self.calibration):
            file = Path(str(given).split(":", 1)[0]) if isinstance(given, str) else given
            if isinstance(file, Path) and out.exists() and file.exists() and out.samefile(file):
                raise UsageError(
                    "the plan would be written over what it is made of",
                    seen=f"{out}",
                    fix=f"another place: {out.with_suffix('.plan').name}",
                )

    def _given(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and those of ``ALWAYS_WRITTEN``."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {
            name: value
            for name, (value, usual) in values.items()
            if value is not None and (value != usual or name in ALWAYS_WRITTEN)
        }

    def argv(self) -> list[str]:
        """The arguments of the command, without ``tessella``."""
        words = [word for module in self.imports for word in ("--import", module)]
        words += ["compile", f"./{self.source}" if self.source[0] == "-" else self.source]
        for name, value in self._given().items():
            if name in ("source", "imports"):
                continue
            written = FORMATTERS.get(name, _one)(value)
            option = option_name(name)
            words += [option] if value is True else [w for t in written for w in (option, t)]
        return words

    def command(self) -> str:
        """The command as a person types it into a shell."""
        return shlex.join(("tessella", *self.argv()))

    def rebuild(self, *objects: str) -> str:
        """How to build the same plan elsewhere: a command that runs, or a line of Python.

        Args:
            objects: settings that only Python knows (``samples``, ``metric``).
        """
        beside: dict[str, Any] = {**dict.fromkeys(NOT_REBUILT), "untuned": False}
        again = replace(self, **beside)
        texts = (self.source, self.calibration or "", self.data or "", *self.imports)
        if objects or any(map(in_memory, texts)):
            return again._python(objects)
        return replace(again, out=plan_name(self.source) + ".plan").command()

    def _python(self, objects: Sequence[str]) -> str:
        """The call in Python, with a comment that lists the names that the reader has to define."""
        values = self._given()
        texts = {n: n if in_memory(v) else repr(v) for n, v in values.items()}
        details = {n: texts.pop(f"calibration_{n}", None) for n in ("split", "samples", "method")}
        if any(details.values()):
            given = {"dataset": texts["calibration"], **details}
            shown = ", ".join(f"{name}={text}" for name, text in given.items() if text)
            texts["calibration"] = f"CalibrationSet({shown})"
        texts |= {name: name for name in objects}
        source = texts.pop("source")
        source = "module" if in_memory(self.source) else source
        texts.pop("imports", None)
        call = ", ".join((source, *(f"{name}={text}" for name, text in texts.items())))
        call = f"pareto({call}).plan" if "metric" in objects else f"compile({call})"
        meant = [f"module is of the class {self.source[1:-1]}"] if source == "module" else []
        meant += [f"{name} is in memory" for name, text in texts.items() if name == text]
        return f"tessella.{call}  # in Python: {', '.join(meant)}"


def read_options(given: Mapping[str, Any]) -> BuildRequest:
    """The request that the options of the command line, as texts, describe.

    Raises:
        UsageError: a text that cannot be read, or a request that cannot be.
    """
    known = {f.name for f in fields(BuildRequest)}
    said = {n: v for n, v in given.items() if n in known and v is not None and v not in ((), [])}
    for name in ("source", "calibration", "data"):
        if in_memory(said.get(name)):  # a file of such a name
            said[name] = f"./{said[name]}"
    return BuildRequest(**{n: PARSERS[n](v) if n in PARSERS else v for n, v in said.items()})


def option_name(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def in_memory(text: object) -> bool:
    """Whether a text stands for an object of a Python program."""
    return isinstance(text, str) and text[:1] == "<" and text[-1:] == ">"


def is_network(source: str) -> bool:
    """Whether a source names a network without trained weights, or a user's module."""
    if source.endswith(".prototxt") or ".py:" in source:
        return not Path(source).is_dir()
    named = source in NETWORKS or source.startswith("timm/")
    return named and not Path(source).exists()


def plan_name(source: str) -> str:
    """The name for a plan of a source: the last part of the source's name."""
    name = source.rpartition(":")[2] if ".py:" in source else source
    return Path(name).name.removesuffix(".onnx").removesuffix(".prototxt") or "network"


def span_of(sizes: Sequence[int], text: str = "") -> DimRange:
    """A batch of one size, or of the smallest, usual and largest size, as a range.

    Args:
        text: the sizes as the user wrote them, for the error.
    """
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
    if not whole or len(sizes) not in (1, 3) or list(sizes) != sorted(sizes) or sizes[0] < 1:
        raise UsageError(
            "a batch is one size, or the smallest, the usual and the largest",
            seen=text or ", ".join(map(str, sizes)) or "nothing",
            fix="write batch=8 or batch=(1, 8, 32), --batch 8 or --batch 1,8,32",
        )
    return DimRange(min=sizes[0], opt=sizes[len(sizes) // 2], max=sizes[-1])


def read_batch(text: str) -> tuple[int, ...]:
    """The sizes in ``"8"`` or ``"1, 8, 32"``; raises ``UsageError`` for any other text."""
    numbers = [n.strip() for n in text.split(",")]
    sizes = [int(n) for n in numbers if re.fullmatch("[0-9]{1,9}", n)]
    span_of(sizes if len(sizes) == len(numbers) else (), text)
    return tuple(sizes)


def _read_precisions(texts: Iterable[str]) -> dict[str, str]:
    """Texts ``NAME=PRECISION`` as a mapping."""
    for text in texts:
        if "=" not in text:
            raise UsageError("a layer's precision is NAME=PRECISION", seen=text, fix="fc=fp32")
    return {name: precision for name, _, precision in (t.rpartition("=") for t in texts)}


def _read_input(text: str) -> TensorSpec:
    """The input in ``image:float32:1x3x224x224``; a size may be ``least..usual..most``."""
    name, dtype, shape = ["", "", "", *text.rsplit(":", 2)][-3:]
    sizes = [re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9})\.\.(\d{1,9}))?", s) for s in shape.split("x")]
    if not name or not all(sizes):
        raise UsageError(
            "an input is NAME:DTYPE:SHAPE, whose first size is the batch",
            seen=text,
            fix="image:float32:1x3x224x224",
        )
    spans = [tuple(int(n) for n in s.groups() if n is not None) for s in sizes if s is not None]
    dims = tuple(s[0] if len(s) == 1 else DimRange(min=s[0], opt=s[1], max=s[2]) for s in spans)
    return TensorSpec(name=name, dtype=dtype, shape=dims)


def _read_preprocess(text: str) -> Preprocess:
    """The preprocessing record in a JSON text, or in a file of that name."""
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        return from_plain(Preprocess, parse_json(text, where="preprocess"), where="preprocess")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "there is no record here", seen=text, fix='write {"height": 224, …} or a file'
        ) from error
    except ArtifactError as error:  # a person wrote it: it is an argument, not an artifact
        raise UsageError(error.wrong, seen=error.seen, fix="correct --preprocess") from error


def _one(value: Any) -> list[str]:
    short = isinstance(value, float) and float(f"{value:g}") == value
    return [f"{value:g}" if short else str(value)]


PARSERS: dict[str, Callable[[Any], Any]] = {
    "target": lambda text: text.replace(" ", ""),
    "batch": read_batch,
    "precisions": _read_precisions,
    "inputs": lambda texts: tuple(map(_read_input, texts)),
    "preprocess": _read_preprocess,
    "imports": tuple,
}
FORMATTERS: dict[str, Callable[[Any], list[str]]] = {
    "batch": lambda sizes: [",".join(map(str, sizes))],
    "precisions": lambda given: [f"{name}={precision}" for name, precision in given.items()],
    "inputs": lambda specs: [f"{s.name}:{s.dtype}:{'x'.join(map(str, s.shape))}" for s in specs],
    "preprocess": lambda record: [canonical_json(record)],
}


def _require_one_of(value: str | None, known: tuple[str | None, ...], wrong: str) -> None:
    if value not in known:
        names = ", ".join(k for k in known if k is not None)
        raise UsageError(wrong, seen=value, fix=f"use one of {names}")


def _require_source(source: str) -> None:
    if is_network(source):
        path = Path(source.rpartition(":")[0] if ".py:" in source else source)
        if (".py:" in source or path.suffix == ".prototxt") and not path.is_file():
            raise UsageError("the network's file is not there", seen=path, fix="give its path")
        return
    path = Path(source)
    if path.suffix == ".onnx":
        if not path.is_file():
            raise UsageError("there is no ONNX file here", seen=source, fix="give its path")
    elif path.is_file():
        raise UsageError(
            "this is a file, and a checkpoint or a run is a folder",
            seen=source,
            fix="give the folder of a run or of a checkpoint; a .plan is compiled already",
        )
    elif not any((path / name).exists() for name in ("run.json", "checkpoint.json")):
        raise ArtifactError(
            "there is no checkpoint here",
            seen=source,
            fix="give a run, a checkpoint, model.onnx, file.py:NAME, net.prototxt, timm/NAME or "
            f"one of {', '.join(NETWORKS)}",
        )


def _rounds(source: str) -> bool:
    """Whether a source is a run or a checkpoint that was trained with the roundings of a plan."""
    return any(any(Path(source).glob(p)) for p in (QUANTIZED, f"checkpoints/*/{QUANTIZED}"))
