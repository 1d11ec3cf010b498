"""The engine: a loaded plan. Loading measures nothing, and compiles nothing where the plan carries
its kernels: it checks, binds and tests.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessella.artifacts.outline import Manifest
from tessella.artifacts.plan import Plan, load_plan
from tessella.artifacts.program import Bucket, Buffer, same_computation
from tessella.core.compiled import CompiledKernels
from tessella.core.count import numbered
from tessella.core.device import torch_device, using
from tessella.core.dtype import Math, dtype_name
from tessella.core.errors import ArtifactError, InputError, UsageError, first_line
from tessella.core.memory import is_out_of_memory, without_collecting
from tessella.core.preprocess import Preprocess
from tessella.core.spec import TensorSpec
from tessella.device.ahead_of_time import PlanKernels, collecting, stored, using_kernels
from tessella.execution.arena import Arena
from tessella.execution.bucket import BoundBucket
from tessella.execution.host_memory import keep_freed_memory
from tessella.execution.steps import Binder
from tessella.operations.tensor_meta import TensorMeta
from tessella.operations.user_operators import require
from tessella.runtime.binders import Binders, require_instructions
from tessella.runtime.cover import costs_us, covers
from tessella.runtime.enough_memory import enough_memory, require_memory
from tessella.runtime.graphs import GraphedBucket
from tessella.runtime.indices import require_rows, tables
from tessella.runtime.settled import Kinds, Settled, answered, kinds_of
from tessella.runtime.settled_graph import SettledGraph
from tessella.runtime.streams import Turns
from tessella.tasks.finished import alignment

Array = np.ndarray | torch.Tensor
Fits = tuple[str, torch.Size, torch.dtype]  # an input's name, shape and element type

# How torch's operators on a CPU say that a number in a tensor is none that they can work with.
_OUT_OF_RANGE = re.compile(r"index (out of range|-?\d+ is out of bounds)|ZeroDivisionError")
MOST_SHAPES = 1024  # of inputs that an engine knows to fit


def load(
    source: str | Path | Plan,
    *,
    device: str | None = None,
    self_test: bool = True,
    compiled: bool = True,
    every_size: bool = False,
) -> Engine:
    """A plan, ready to run.

    Args:
        source: the path of a plan file, or a plan.
        device: ``cpu``, or a GPU by its number, ``cuda:1``; by default the current GPU. The program
            for it is taken from the file; the engine stays on it, whoever calls it.
        self_test: run the plan's recorded inputs and compare with the recorded outputs.
        compiled: run the machine code that a plan for a GPU carries. Without, its kernels are
            compiled here from Tessella's own sources, some seconds each: for a plan whose author
            is not trusted with this process's GPU memory.
        every_size: get the programs of all batch sizes ready, as a server wants it. Otherwise that
            of a size that was not asked for yet gets ready at its first call, which takes longer,
            and is checked then. On a GPU all are ready in any case.

    Raises:
        WrongDevice: the plan was built for another device; the message has the rebuild command.
        ArtifactError: the file cannot be trusted, or the self-test fails.
        UsageError: there is no such device.
    """
    with using(device), without_collecting():
        plan = source if isinstance(source, Plan) else load_plan(source)
        engine = Engine(plan, compiled=compiled)
        if self_test:
            with enough_memory(plan, engine.device):
                engine.self_test(plan.golden)
        if every_size:
            engine.warm_up()
    return engine


def add_kernels(plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan with the machine code of all that loading it launches, for its GPU.

    It is loaded once, here: so what it carries is what another load will ask for.

    Returns:
        The plan, and by name why a kernel will be compiled where the plan is loaded.
    """
    target = plan.manifest.fingerprint.target
    if torch_device(target).type != "cuda":
        return plan, {}
    with collecting(target) as made:
        load(plan, compiled=False).close()
    return replace(plan, compiled=made.compiled), made.left_out


def compiled_here(manifest: Manifest, kernels: PlanKernels) -> str:
    """What a person has to know of a plan whose kernels were compiled while it was loaded."""
    spent_s = time.perf_counter() - kernels.missed_since
    return (
        f"compiled here in {spent_s:.1f} s, as the plan of {manifest.built_from} does not carry "
        f"them for this version of Tessella: {', '.join(sorted(kernels.missed))}. Triton keeps "
        f"them in its cache for the next start on this machine. To do: write the plan anew, "
        f"{manifest.rebuild}"
    )


class Engine:
    """A plan bound to this machine's kernels and memory. Safe to call from several threads.

    >>> engine = load("flowers.plan")
    >>> engine(image=images)["scores"]      # NumPy in, NumPy out; torch in, torch out; any batch

    Attributes:
        manifest: what the plan says about itself.
        device: where it runs.
        buckets: the batch sizes that it has a program for.
        machine_code: what its steps launch: the plan's, or what this process has
            compiled; None on a CPU, and on a GPU that is only the nearest to the target's.
    """

    def __init__(self, plan: Plan, *, compiled: bool = True) -> None:
        manifest = plan.manifest
        target = manifest.fingerprint.target
        self.manifest: Manifest = manifest
        manifest.fingerprint.require_here(rebuild=manifest.rebuild, targets=plan.targets)
        require_instructions(plan)
        self.device = torch_device(target)
        require(manifest.imports)
        self.buckets = tuple(b.batch for b in plan.program.buckets)
        first, *others = plan.program.buckets
        # of a short program a call's own code is a twentieth: what it asks for stands ready
        self._inputs, self._names = manifest.inputs, [spec.name for spec in manifest.inputs]
        self._output_names = [spec.name for spec in manifest.outputs]
        self._differ = not all(same_computation(first, other) for other in others)
        self._covers = covers(costs_us(plan))
        self._lock = threading.Lock()
        self.machine_code = stored(plan.compiled if compiled else CompiledKernels(), target)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._turns = None if self.device.type == "cpu" else Turns(self.device)
        self._fits: dict[Fits, tuple[int, ...]] = {}
        self._rows = tables(plan.program, plan.weights)
        # of arrays that fit a program exactly
        self._settled: dict[Kinds, Settled | SettledGraph | None] = {}
        self._binding = threading.Lock()
        self._bound: dict[int, BoundBucket | GraphedBucket] = {}
        self._closed = False
        self._binders: Binders | None = None
        with enough_memory(plan, self.device), using_kernels(self.machine_code):
            if self.device.type == "cpu":
                self._binders = self._binders_of(plan)
            else:
                self._bound = self._captured(plan, self._binders_of(plan))
        if self._binders is not None:
            self._program(self.buckets[0])
        if isinstance(self.machine_code, PlanKernels) and self.machine_code.missed:
            warnings.warn(compiled_here(manifest, self.machine_code), stacklevel=3)

    def _binders_of(self, plan: Plan) -> Binders:
        """What each batch size's program is bound with, by size, once the memory is known to do."""
        math: Math = "tf32" if self._turns and plan.manifest.precision == "tf32" else "ieee"
        for bucket in plan.program.buckets:
            require_memory(bucket.arena_bytes, self.device)
            for meta in (*self._input_metas(bucket), *map(_buffer_meta, bucket.buffers)):
                require_memory(meta.nbytes, self.device)
        weights = {n: t.to(self.device) for n, t in plan.weights.items()}
        arena = Arena(max(b.arena_bytes for b in plan.program.buckets), self.device)
        return Binders(
            plan,
            {
                bucket.batch: Binder(
                    program=plan.program,
                    bucket=bucket,
                    weights=weights,
                    inputs=self._input_metas(bucket),
                    target=plan.manifest.fingerprint.target,
                    math=math,
                    arena=arena,
                )
                for bucket in plan.program.buckets
            },
        )

    def _captured(self, plan: Plan, binders: Binders) -> dict[int, BoundBucket | GraphedBucket]:
        """All programs as CUDA graphs."""
        assert self._turns is not None
        pool = torch.cuda.graph_pool_handle()
        ready: dict[int, BoundBucket | GraphedBucket] = {}
        # the largest first: the smaller graphs then fit into memory that it left in the pool
        for batch in reversed(self.buckets):
            inputs, math = binders.of[batch].inputs, binders.of[batch].math
            bound = binders.bound(batch)
            with self._tested():  # the steps run, to be captured
                ready[batch] = GraphedBucket(
                    bound,
                    inputs,
                    math=math,
                    pool=pool,
                    stream=self._turns.own,
                    device=self.device,
                )
        return ready

    def _program(self, batch: int) -> BoundBucket | GraphedBucket:
        """The program of a batch size; on a CPU it is bound when it is first asked for."""
        if (known := self._bound.get(batch)) is not None:
            return known
        with self._binding:
            if batch not in self._bound:
                if self._closed or self._binders is None:
                    raise UsageError("the engine is closed", fix="load the plan again")
                binders = self._binders
                with (
                    enough_memory(binders.plan, self.device),
                    using_kernels(self.machine_code),
                    self._by_default(),
                ):
                    self._bound[batch] = binders.bound(batch)
                if not binders.of:
                    self._binders = None
            return self._bound[batch]

    def _by_default(self) -> AbstractContextManager[object]:
        """Tensors are made on the engine's device, whatever the caller's default is. That context
        costs a microsecond for each of torch's calls, a tenth of loading: mostly it is not needed.
        """
        same = torch.get_default_device() == self.device
        return nullcontext() if same else torch.device(self.device)

    def warm_up(self) -> None:
        """Get the programs of all batch sizes ready: then no first call of one takes longer, and
        weights that the kernels have in forms of their own are no longer held beside these.

        Raises:
            ArtifactError: one cannot be bound to its kernels.
        """
        for batch in self.buckets:
            self._program(batch)

    def _input_metas(self, bucket: Bucket) -> list[TensorMeta]:
        return [TensorMeta(shape=s.at(bucket.batch), dtype=s.dtype) for s in self.inputs]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.outputs

    @property
    def has_rows(self) -> bool:
        """Whether an input holds numbers of rows, which every call looks at."""
        return bool(self._rows)

    @property
    def preprocess(self) -> Preprocess | None:
        return self.manifest.preprocess

    @property
    def labels(self) -> tuple[str, ...]:
        return self.manifest.labels

    def bound(self, batch: int) -> BoundBucket | GraphedBucket:
        """The program for one of ``buckets``, for profiling."""
        if batch not in self.buckets:
            raise UsageError(
                "the engine has no program for this batch size",
                seen=batch,
                fix=f"use one of {self.buckets}",
            )
        return self._program(batch)

    @contextmanager
    def alone(self, batch: int) -> Iterator[BoundBucket | GraphedBucket]:
        """``bound(batch)`` while no other call of this engine runs."""
        with self._lock, self._turns or nullcontext():
            yield self.bound(batch)

    def __call__(self, *positional: Array, **named: Array) -> dict[str, Any]:
        """Run on any batch of one or more samples.

        Args:
            positional: the inputs in order; or ``named``: by name. All NumPy arrays or all tensors.

        Returns:
            The outputs by name, in memory of their own: arrays for arrays, tensors on the inputs'
            device for tensors.

        Raises:
            InputError: an input is missing, unknown, or of another shape or element type.
            ArtifactError: the plan's program for this size, which is asked for the first time,
                cannot be bound to its kernels.
        """
        arrays = self._in_order(positional, named)
        if (kinds := kinds_of(arrays, tensors=self._turns is None)) in self._settled:
            with self._lock:
                if (settled := self._settled.get(kinds)) is not None:
                    try:
                        return answered(settled, arrays)
                    except (IndexError, RuntimeError) as error:
                        _require_other(error)
                        raise
        tensors = [self._tensor(spec, a) for spec, a in zip(self._inputs, arrays, strict=True)]
        count = tensors[0].shape[0]
        if len(tensors) > 1 and any(len(t) != count for t in tensors):
            raise InputError(
                "the inputs have different batch sizes",
                seen=", ".join(f"{s.name}: {len(t)}" for s, t in zip(self.inputs, tensors)),
                fix="send as many samples of each",
            )
        first = arrays[0]
        where = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
        made = self._run(tensors, count, where)
        if kinds and count in self._bound and kinds not in self._settled:
            self._settle(kinds, count)
        if isinstance(first, np.ndarray):
            return {n: t.numpy() for n, t in zip(self._output_names, made, strict=True)}
        return dict(zip(self._output_names, made, strict=True))

    def _settle(self, kinds: Kinds, count: int) -> None:
        """Have the calls with arrays like these, which fit, ask no more, where that can be: not
        where a larger size's program is faster and takes them, and their own has never run.
        """
        with self._lock:
            bound, names = self._bound.get(count), self._output_names
            if self._rows:  # row numbers are looked at in every call
                return
            if isinstance(bound, BoundBucket):
                self._settled[kinds] = Settled.of(bound, self._inputs, names)
            elif bound is not None and self._turns is not None:
                shapes = [shape for shape, _ in kinds]
                self._settled[kinds] = SettledGraph.of(bound, self._turns, names, shapes)

    def _in_order(self, positional: Sequence[Array], named: Mapping[str, Array]) -> Sequence[Array]:
        names = self._names
        if not positional and len(named) == 1 == len(names) and names[0] in named:
            return (named[names[0]],)
        if len(positional) == len(names) and not named:
            return positional
        arrays = dict(zip(names, positional)) | dict(named)
        if len(positional) + len(named) != len(names) or set(arrays) != set(names):
            raise InputError(
                "the inputs are not the plan's",
                seen=f"{len(positional)} without a name, {sorted(named) or 'none'} by name",
                fix=f"give {', '.join(str(s) for s in self.inputs)}",
            )
        return [arrays[name] for name in names]

    def _tensor(self, spec: TensorSpec, array: Array) -> torch.Tensor:
        """The input as a contiguous tensor that fits ``spec``, without a copy where possible."""
        if isinstance(array, np.ndarray):
            if not (array.flags.writeable and array.flags.c_contiguous):
                array = np.array(array, order="C")
            try:
                array = torch.from_numpy(array)
            except (TypeError, ValueError):  # torch has no such type: then no plan has it
                spec.check(shape=array.shape, dtype=str(array.dtype))
                raise
        if not isinstance(array, torch.Tensor):
            raise InputError(
                f"input {spec.name!r} is neither a NumPy array nor a torch tensor",
                seen=type(array).__name__,
                fix="convert it with numpy.asarray",
            )
        if array.layout != torch.strided or array.is_meta:
            raise InputError(
                f"input {spec.name!r} has no numbers that lie as a shape says",
                seen="a meta tensor" if array.is_meta else f"{array.layout}",
                fix="give a dense tensor: tensor.to_dense()",
            )
        key = spec.name, array.shape, array.dtype
        strides = self._fits.get(key)
        if strides is None:
            spec.check(shape=tuple(array.shape), dtype=dtype_name(array.dtype))
            if len(self._fits) == MOST_SHAPES:
                self._fits.clear()
            strides = self._fits[key] = _plain_strides(array.shape)
        if array.requires_grad:
            array = array.detach()
        if array.is_neg():  # the sign is only noted, and machine code reads memory
            array = array.resolve_neg()
        if self._turns is None and not array.is_cpu:
            array = array.cpu()
        if array.stride() != strides:
            array = array.contiguous().as_strided(array.shape, strides)
        if spec.name in self._rows:
            require_rows(spec.name, array, self._rows[spec.name])
        return array

    def _run(
        self, tensors: list[torch.Tensor], count: int, where: torch.device
    ) -> list[torch.Tensor]:
        """Cut the batch into buckets, run them, and copy the results out."""
        largest = self.buckets[-1]
        full, rest = divmod(count, largest)
        sizes = self._covers[largest] * full + self._covers[rest]
        with self._lock, self._turn(tensors):
            if self._closed:
                raise UsageError("the engine is closed", fix="load the plan again")
            if sizes == (count,):
                return self._run_bucket(count, tensors, 0, count, where)
            parts, start = [], 0
            for size in sizes:
                taken = min(size, count - start)
                parts.append(self._run_bucket(size, tensors, start, taken, where))
                start += taken
        if len(parts) == 1:
            return parts[0]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _turn(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """The stream of a call: on a GPU it waits for the call before and for the work that made
        the inputs.
        """
        if self._turns is None:
            return nullcontext()
        on_gpu = any(t.is_cuda for t in tensors)
        return self._turns if on_gpu else self._turns.in_own_stream()

    def _run_bucket(
        self, size: int, tensors: list[torch.Tensor], start: int, taken: int, where: torch.device
    ) -> list[torch.Tensor]:
        """Run samples from ``start`` on in one bucket, and copy the results out."""
        bound = self._program(size)
        if taken < len(tensors[0]):
            tensors = [t[start : start + taken] for t in tensors]
        if isinstance(bound, GraphedBucket):
            made = bound(tensors)
        else:
            if taken < size:
                tensors = [torch.cat([t, t.new_zeros(size - taken, *t.shape[1:])]) for t in tensors]
            try:
                with torch.inference_mode():
                    made = bound(tensors)
            except (IndexError, RuntimeError) as error:
                _require_other(error)
                raise
        if taken < size:
            made = [t[:taken] for t in made]
        # outside of inference mode and always a copy: what a caller keeps is never the arena's
        return [
            t.clone(memory_format=torch.contiguous_format)
            if t.device == where
            else t.contiguous().to(where)
            for t in made
        ]

    def self_test(self, golden: Mapping[str, torch.Tensor], *, every_size: bool = False) -> None:
        """Run recorded inputs, repeated up to the smallest batch, and compare the outputs.

        One batch size speaks for all, as they have the same steps; unless two are one step at some
        sizes only, or some steps' attributes follow the batch: then each size runs the recorded
        samples, repeated. With ``every_size`` each does in any case.

        Raises:
            ArtifactError: it cannot run, or an output deviates by more than the plan's tolerance.
        """
        wanted = {f"input.{s.name}" for s in self.inputs}
        wanted |= {f"output.{s.name}" for s in self.outputs}
        if set(golden) != wanted:
            raise self._fails("it does not have the plan's inputs and outputs", sorted(golden))
        with self._tested():
            counts = {name: len(tensor) for name, tensor in golden.items()}
            if len(set(counts.values())) > 1:
                raise self._fails("its tensors have different numbers of samples", counts)
            rows = max(self.inputs[0].batch.min, *counts.values())
            inputs = {s.name: _repeated(golden[f"input.{s.name}"], rows) for s in self.inputs}
            outputs = {s.name: _repeated(golden[f"output.{s.name}"], rows) for s in self.outputs}
            self._compare(self(**inputs), outputs)
            for size in self.buckets if self._differ or every_size else ():
                given = [_repeated(t, size) for t in inputs.values()]
                with self._lock, self._turn(given):
                    made = self._run_bucket(size, given, 0, size, torch.device("cpu"))
                right = {n: _repeated(t, size) for n, t in outputs.items()}
                self._compare(dict(zip(outputs, made, strict=True)), right)

    @contextmanager
    def _tested(self) -> Iterator[None]:
        """Raise ``ArtifactError`` where the plan's steps cannot run, for whatever reason; running
        out of memory is told by ``enough_memory``.
        """
        try:
            yield
        except ArtifactError:
            raise
        except Exception as error:  # attributes from a stranger: what they may raise has no end
            if is_out_of_memory(error):
                raise
            raise self._fails("it cannot run", first_line(error)) from error

    def _compare(
        self, made: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor]
    ) -> None:
        for name, right in recorded.items():
            tensor = made[name]
            if (tensor.shape, tensor.dtype) != (right.shape, right.dtype):
                kinds = " and ".join(f"{t.dtype} {tuple(t.shape)}" for t in (tensor, right))
                raise self._fails(f"output {name!r} is not the recorded one", kinds)
            tensor = alignment(self.manifest.task)(name, tensor, right)
            error = _error(tensor.double(), right.double())
            if not error <= self.manifest.tolerance:
                raise self._fails(
                    f"output {name!r} is not the recorded one",
                    f"error {error:.2e} of the largest value, "
                    f"allowed {self.manifest.tolerance:.0e}",
                )

    def _fails(self, why: str, seen: object) -> ArtifactError:
        fix = f"rebuild it here: {self.manifest.rebuild}"
        return ArtifactError(f"the plan fails its self-test: {why}", seen=seen, fix=fix)

    def __repr__(self) -> str:
        manifest, batches = self.manifest, numbered(self.buckets, "batch", "batches")
        shapes = " ".join(map(str, self.inputs)), " ".join(map(str, self.outputs))
        closed = ", closed" if self._closed else ""
        return (
            f"<Engine of {manifest.built_from} on {self.device}, {manifest.precision},"
            f" {batches}: {shapes[0]} → {shapes[1]}{closed}>"
        )

    def close(self) -> None:
        """Give the memory back; later calls raise ``UsageError``."""
        with self._lock, self._binding:
            self._closed = True
            self._bound, self._binders = {}, None
            self._settled = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _require_other(error: Exception) -> None:
    """Raise ``InputError`` if a step could not work with the numbers that it was given."""
    if _OUT_OF_RANGE.match(str(error)) is not None:
        raise InputError(
            "an input holds a value that the network cannot take",
            seen=first_line(error),
            fix="send indices within the tables that they point into, and divisors but 0",
        ) from error


def _error(made: torch.Tensor, right: torch.Tensor) -> float:
    """Largest error over the largest value; the same infinity, or NaN in both, is no error."""
    if not right.numel():
        return 0.0
    same = ((made == right) | (made.isnan() & right.isnan())) & ~right.isfinite()
    made, right = made.masked_fill(same, 0.0), right.masked_fill(same, 0.0)
    return float((made - right).abs().max() / right.abs().max().clamp_min(1e-30))


def _repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor of so many rows: the given ones from the first on, repeated as often as needed."""
    return tensor[torch.arange(rows, device=tensor.device) % len(tensor)]


def _plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that a contiguous tensor of this shape has by default.

    An axis of size 1 may have any stride, and torch reads a memory format out of it: a grey
    image cut from NHWC bytes is contiguous, and yet a convolution answers in channels_last.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _buffer_meta(buffer: Buffer) -> TensorMeta:
    return TensorMeta(shape=buffer.shape, dtype=buffer.dtype)
