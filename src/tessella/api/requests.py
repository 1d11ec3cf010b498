"""The arguments of ``compile`` and ``pareto`` as a build request, and requests as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from tessella.api.sources import batch_range
from tessella.artifacts.build import BuildRequest, in_memory
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.plan import Plan
from tessella.artifacts.run import Run
from tessella.compiler.budget import top1
from tessella.compiler.samples import CalibrationSet
from tessella.core.device import default_target
from tessella.core.errors import UsageError
from tessella.core.spec import DimRange
from tessella.graph.graph import Graph

FIELDS = frozenset(f.name for f in fields(BuildRequest))


@dataclass(frozen=True, kw_only=True)
class CompileCall:
    """A call of ``compile`` or ``pareto``: its request, and the arguments, some of them objects."""

    request: BuildRequest
    arguments: Mapping[str, Any]

    def rebuild(self, plan: Plan | None = None) -> str:
        """The command that builds a plan again, or a line of Python where no command can.

        Args:
            plan: the plan that was built; the modules that define its kernels are then named.
        """
        request = self.request
        programs = () if plan is None else (plan, *plan.others)
        modules = sorted({m for p in programs for m in p.manifest.imports.values()})
        # a file of the user's that is the source itself defines them again
        modules = [m for m in modules if not m.startswith("tessella_user_")]
        imports = tuple("<__main__>" if m == "__main__" else m for m in modules)
        objects = [n for n in ("samples", "metric") if self.arguments.get(n) not in (None, top1)]
        return replace(request, imports=imports).rebuild(*objects)

    def with_imports(self, plan: Plan) -> Plan:
        """The plan, whose command for building it again names the modules that it needs."""
        if not any(p.manifest.imports for p in (plan, *plan.others)):
            return plan
        rebuild = self.rebuild(plan)
        one, *others = (
            replace(p, manifest=replace(p.manifest, rebuild=rebuild)) for p in (plan, *plan.others)
        )
        return replace(one, others=tuple(others))


def compile_call(**arguments: Any) -> CompileCall:
    """The call with these arguments, checked before a network is opened.

    Raises:
        UsageError, ArtifactError: a setting is impossible, or a file is missing.
    """
    texts = {name: _recorded(name, value) for name, value in arguments.items() if name in FIELDS}
    calibration = arguments.get("calibration")
    if isinstance(calibration, CalibrationSet):
        texts["calibration"] = str(calibration.dataset)
        for name in ("split", "samples", "method"):
            if (value := getattr(calibration, name)) != getattr(CalibrationSet, name):
                texts[f"calibration_{name}"] = value
    request = BuildRequest(**texts)
    request.require_files()
    if request.budget is not None and arguments.get("samples"):
        raise UsageError("a budget is judged by labelled data", fix="leave out samples")
    request = replace(request, target=request.target or default_target())
    return CompileCall(request=request, arguments=arguments)


def keywords(request: BuildRequest) -> dict[str, Any]:
    """A request as keyword arguments of ``compile`` or ``pareto``, ``source`` among them."""
    given = {f.name: getattr(request, f.name) for f in fields(request)}
    details = {n: given.pop(f"calibration_{n}") for n in ("split", "samples", "method")}
    details = {name: value for name, value in details.items() if value is not None}
    if details:
        given["calibration"] = CalibrationSet(dataset=Path(given["calibration"]), **details)
    for name in ("out", "front", "chart", "point", "imports"):
        del given[name]
    return {**given, "inputs": given["inputs"] or None}


def _recorded(name: str, value: Any) -> Any:
    """A setting as the request holds it; an object as its name in angle brackets."""
    if name == "batch":
        span: DimRange = batch_range(value)
        return (span.min,) if span.min == span.max else (span.min, span.opt, span.max)
    if name == "inputs":
        return tuple(value or ())
    if name == "target" and value is not None and not isinstance(value, str):
        return ",".join(value)
    if name == "precisions":
        return dict(value) if value else None
    if isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, Graph):
        return f"<{value.name or 'graph'}>"
    if isinstance(value, Checkpoint | Run | Dataset):
        value = value.path
    if isinstance(value, str | Path) and name in ("source", "calibration", "data", "lock", "cache"):
        return f"./{value}" if in_memory(str(value)) else str(value)
    if name in ("calibration", "data", "lock") and value is not None:
        return f"<{name}>"
    return value
