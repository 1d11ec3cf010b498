"""operator: a kernel of a user's own becomes a function on tensors, with a gradient.

It is one operator of torch: autograd differentiates it, torch.export (and so the compiler) sees one
node, ``find`` can list it beside our kernels, and a plan carries it as a step.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import typing
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tessella.core.dtype import dtype_name
from tessella.core.errors import KernelError, UsageError, first_line
from tessella.device import launch
from tessella.device.launch import Launched
from tessella.kernels import catalog
from tessella.kernels.user import candidate
from tessella.kernels.user.check import compare
from tessella.kernels.user.launches import Launch
from tessella.kernels.user.report import Report, Where, report
from tessella.operations import user_operators as registry
from tessella.operations.problem import Problem
from tessella.operations.user_operators import Tensors, as_tuple


def operator(
    name: str,
    *,
    shape: Callable[..., Tensors],
    gradient: Callable[..., Any] | Literal["reference"] | None = None,
    reference: Callable[..., Tensors] | None = None,
    dtypes: Sequence[str] = ("float32",),
) -> Callable[[Callable[..., Launch | Sequence[Launch]]], Operator]:
    """Decorates a function that says how kernels are launched; makes it an ``Operator``.

    The function has typed parameters (tensors, ``Tensor | None``, numbers, strings, lists of
    numbers), and ``out``: the tensor to fill (annotated ``Tensor``), or several (``tuple[Tensor,
    Tensor]``). It returns a ``Launch``, or several in order. It gets contiguous tensors.

    >>> @operator("mine::saxpy", shape=lambda a, x, y: torch.empty_like(x),
    ...           gradient=lambda grad, a, x, y: (None, a * grad, grad),
    ...           reference=lambda a, x, y: a * x + y)
    ... def saxpy(a: float, x: Tensor, y: Tensor, *, out: Tensor) -> Launch:
    ...     return Launch(kernel=_saxpy, grid=(triton.cdiv(out.numel(), 1024),),
    ...                   args=(a, x, y, out, out.numel()), constants={"BLOCK": 1024})

    Args:
        name: ``namespace::name``; defining it again replaces it.
        shape: with the same arguments: new, unfilled outputs (``x.new_empty(…)``).
        gradient: ``gradient(grad, *arguments)``, or with a parameter ``out`` the outputs too: the
            gradient of each argument, None where there is none. May call other operators. The word
            ``"reference"`` differentiates the reference. Without one it cannot be trained through.
        reference: the same in plain torch. It gives the result where the kernel cannot run, and the
            right answer that ``check`` and the compiler compare with. A plan needs it.
        dtypes: floating element types that the kernels take.

    Raises:
        UsageError: the function's parameters, or the name, cannot be those of an operator.
    """
    return lambda function: Operator(
        name, function, shape=shape, gradient=gradient, reference=reference, dtypes=tuple(dtypes)
    )


class Operator:
    """Call it like a function of tensors; see ``operator``.

    Attributes:
        name: ``namespace::name``.
        module: what to import so that it is defined.
        reference, dtypes: as given.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Launch | Sequence[Launch]],
        *,
        shape: Callable[..., Tensors],
        gradient: Callable[..., Any] | Literal["reference"] | None,
        reference: Callable[..., Tensors] | None,
        dtypes: tuple[str, ...],
    ) -> None:
        self.name, self.dtypes, self.reference = name, dtypes, reference
        self.module = _importable(function)
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._function, self._shape, self._gradient = function, shape, gradient
        self._last: tuple[Where, str, list[tuple[Launch, Launched | None]]] | None = None
        self._warned = False
        self.signature = _signature(name, function)
        if gradient == "reference" and reference is None:
            raise UsageError("there is no reference to differentiate", seen=name, fix="give one")
        self._torch = self._defined()
        registry.OPERATORS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensors:
        """The outputs. Under autocast in its element type if the kernels take it, else float32."""
        return self._torch(
            *[self._cast(a) for a in args], **{n: self._cast(a) for n, a in kwargs.items()}
        )

    def __repr__(self) -> str:
        return f"<operator {self.name}{self.signature}>"

    def run(self, *args: Any, out: Tensors | None = None) -> Tensors:
        """The outputs (``out``, filled, if given), without autograd.

        Raises:
            KernelError: a tensor's element type is not among ``dtypes``; or the tensors are on the
                CPU, and there is neither an interpreted kernel nor a reference.
        """
        given = _contiguous(self._bound(args))
        device = self._require(given)
        made = self._shape(*given) if out is None else out
        launches = self.launches(*given, out=made)
        where = self._where(device, launches)
        if where == "reference":
            started: list[Launched | None] = [None] * len(launches)
            made = self._by_reference(given, out)
        else:
            target = target_of(device) if where == "compiled" else None
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                started = [one.start(target) for one in launches]
        kept = [one.without_arguments() for one in launches]
        self._last = where, target_of(device), list(zip(kept, started, strict=True))
        return made

    def empty(self, *args: Any) -> Tensors:
        """The outputs, not filled; works for meta tensors too."""
        return self._shape(*_contiguous(self._bound(args)))

    def launches(self, *args: Any, out: Tensors | None = None) -> list[Launch]:
        """What a call with these arguments launches."""
        given = self._bound(args)
        made = self._function(*given, out=self._shape(*given) if out is None else out)
        return [made] if isinstance(made, Launch) else list(made)

    @property
    def last_launches(self) -> tuple[Report, ...]:
        """What the last call launched, in order: grid, block, registers, occupancy."""
        if self._last is None:
            raise UsageError("the operator has not run yet", seen=self.name, fix="call it")
        where, target, launches = self._last
        return tuple(
            report(where, one.name, one.threads, made or one.compiled(target), target)
            for one, made in launches
        )

    @property
    def last_launch(self) -> Report:
        """The last of ``last_launches``."""
        return self.last_launches[-1]

    def check(self, *args: Any, tolerance: float | None = None) -> float:
        """Compare values, and gradients if there are any, with the reference in float64.

        Returns:
            The largest error over the largest value.

        Raises:
            KernelError: it is larger than ``tolerance`` (by element type: 1e-4, 1e-2, 5e-2).
        """
        if self.reference is None:
            raise UsageError("there is no reference to compare with", seen=self.name)
        return compare(
            self.name,
            self,
            self.reference,
            self._bound(args),
            gradients=self._gradient is not None,
            tolerance=tolerance,
        )

    def register(
        self,
        op: str,
        *,
        algorithm: str,
        fits: Callable[[Problem], str | None] | None = None,
        targets: tuple[str, ...] = ("gpu",),
    ) -> str:
        """Let the operator compete for an operation of ours, in ``find`` and in plans.

        Tensor parameters are the operation's inputs in order (what may be left out is ``Tensor |
        None``), the others its attributes by name. Problems are refused that have more inputs, or
        attributes that it does not take, or other element types than ``dtypes``, or whose result
        is not what ``shape`` says.

        Args:
            op: ``linear``, ``conv2d``, …
            algorithm: its name in the kernel's id: ``linear.skinny``.
            fits: None, or the reason why it cannot carry out a problem.
            targets: where it can run: ``cpu``, ``gpu`` for any, or one GPU's (``sm_90``).

        Returns:
            The kernel's id.
        """
        row = candidate.UserKernel(
            id=f"{op}.{algorithm}",
            op=op,
            module=self.module,
            targets=targets,
            source="user",
            version=self._version(),
            operator=self,
            refuses=fits,
        )
        catalog.register(row)
        registry.CANDIDATES[row.id] = self.module
        return row.id

    def _cast(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        if not torch.is_autocast_enabled(value.device.type):
            return value
        dtype = torch.get_autocast_dtype(value.device.type)
        return value.to(dtype if dtype_name(dtype) in self.dtypes else torch.float32)

    def _require(self, args: Sequence[Any]) -> torch.device:
        """The device of all tensors. A kernel that reads another type than it was written for, or
        an address of another device, would answer nonsense, or worse.
        """
        tensors = [a for a in args if isinstance(a, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() and dtype_name(tensor.dtype) not in self.dtypes:
                raise KernelError(
                    f"{self.name} does not take this element type",
                    seen=dtype_name(tensor.dtype),
                    fix=f"give {' or '.join(self.dtypes)}, or name the type in dtypes= if the "
                    "kernel takes it",
                )
        devices = {t.device for t in tensors} or {torch.device("cpu")}
        if len(devices) > 1:
            raise KernelError(
                f"the tensors of {self.name} are not on one device",
                seen=", ".join(sorted(map(str, devices))),
                fix="move them to one",
            )
        return devices.pop()

    def _defined(self) -> Callable[..., Tensors]:
        """The operator of torch."""

        def run(*args: Any) -> Tensors:
            return self.run(*args)

        run.__signature__ = self.signature  # type: ignore[attr-defined]
        try:
            defined = torch.library.custom_op(self.name, run, mutates_args=())
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                "the function cannot be an operator of torch",
                seen=f"{self.name}: {first_line(error)}",
                fix="name it namespace::name and annotate each parameter, and out as Tensor or "
                "tuple[Tensor, …]",
            ) from error
        defined.register_fake(self.empty)
        if self._gradient is not None:
            defined.register_autograd(self._backward, setup_context=self._remember)
        return defined

    def _remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = self._bound(inputs)  # torch leaves out what has its default value
        outputs = as_tuple(output) if self._gradient_reads_out else ()
        tensors = [t for t in (*given, *outputs) if isinstance(t, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.values = [
            None if isinstance(i, Tensor) else (i,) for i in (*given, *outputs)
        ]  # a number in its place, None for the next saved tensor
        ctx.arguments = len(given)

    @property
    def _gradient_reads_out(self) -> bool:
        return callable(self._gradient) and "out" in inspect.signature(self._gradient).parameters

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if kept is None else kept[0] for kept in ctx.values]
        args, outputs = values[: ctx.arguments], tuple(values[ctx.arguments :])
        grad = grads[0] if len(grads) == 1 else grads
        if self._gradient == "reference":
            assert self.reference is not None  # as ``__init__`` asks
            needed = [*ctx.needs_input_grad, *[False] * len(args)][: len(args)]
            return _through(self.reference, args, grads, needed)
        extra = {}
        if self._gradient_reads_out:
            extra["out"] = outputs[0] if len(outputs) == 1 else outputs
        assert self._gradient is not None  # without one it is not registered
        made = self._gradient(grad, *args, **extra)
        made = (made,) if isinstance(made, Tensor) or made is None else tuple(made)
        if len(made) != len(args):
            raise KernelError(
                f"the gradient of {self.name} gives another number of gradients than arguments",
                seen=f"{len(made)} for {', '.join(self.signature.parameters)}",
                fix="return one for each argument, None where there is none",
            )
        return made

    def _where(self, device: torch.device, launches: Sequence[Launch]) -> Where:
        if launch.only_compiles():
            return "compiled"
        if device.type == "cuda":
            return "gpu"
        if all(one.interpreted for one in launches):
            return "interpreter"
        if self.reference is None:
            raise KernelError(
                f"{self.name} cannot run on the CPU",
                seen=", ".join(sorted({one.name for one in launches})),
                fix="give a reference=; for a Triton kernel, setting TRITON_INTERPRET=1 before the "
                "first import of triton does too",
            )
        return "reference"

    def _by_reference(self, args: Sequence[Any], out: Tensors | None) -> Tensors:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} got tensors on the CPU: its reference gives the result, not its "
                "kernel",
                RuntimeWarning,
                stacklevel=3,
            )
        assert self.reference is not None  # as ``_where`` asks
        made = _contiguous_outputs(self.reference(*args))
        if out is None:
            return made
        for to, value in zip(as_tuple(out), as_tuple(made), strict=True):
            to.copy_(value)
        return out

    def _bound(self, args: Sequence[Any]) -> list[Any]:
        bound = self.signature.bind(*args)
        bound.apply_defaults()
        return list(bound.args)

    def _version(self) -> int:
        """A number that changes with the source of the launch and of its kernels' module."""
        return int(hashlib.sha256(_source(self._function).encode()).hexdigest()[:8], 16)


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    """The operator's signature without ``out``, which says what comes back."""
    found = inspect.signature(function)
    hints = typing.get_type_hints(function)
    if "out" not in found.parameters or "out" not in hints:
        raise UsageError(
            "the function that launches a kernel has no annotated parameter out",
            seen=f"{name}{found}",
            fix="add *, out: Tensor (or tuple[Tensor, Tensor])",
        )
    parameters = [
        p.replace(annotation=hints.get(p.name, p.empty), kind=p.POSITIONAL_OR_KEYWORD)
        for p in found.parameters.values()
        if p.name != "out"
    ]
    return inspect.Signature(parameters, return_annotation=hints["out"])


def _importable(function: Callable[..., Any]) -> str:
    """The name of the module to import; of a script, which has none, its file's."""
    module = function.__module__
    if module != "__main__" and not module.startswith("tessella_user_"):
        return module
    return Path(getattr(sys.modules[module], "__file__", None) or module).stem


def _source(function: Callable[..., Any]) -> str:
    """The text of the module that defines a function; of the function if it has no file."""
    try:
        return Path(inspect.getfile(function)).read_text()
    except (OSError, TypeError):
        return repr(function.__code__.co_code)


def _contiguous(args: Sequence[Any]) -> list[Any]:
    return [a.contiguous() if isinstance(a, Tensor) else a for a in args]


def _contiguous_outputs(made: Tensors) -> Tensors:
    return made.contiguous() if isinstance(made, Tensor) else tuple(t.contiguous() for t in made)


def target_of(device: torch.device) -> str:
    """The GPU to compile for: that of the device; for the CPU, Hopper."""
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return "sm_90"


def _through(
    function: Callable[..., Tensors],
    args: Sequence[Any],
    grads: Sequence[Any],
    needed: Sequence[bool],
) -> tuple[Any, ...]:
    """Gradients by running a function again, and differentiating that."""
    with torch.enable_grad():
        leaves = [
            a.detach().requires_grad_() if need else a for a, need in zip(args, needed, strict=True)
        ]
        outputs = as_tuple(function(*leaves))
        wanted = [a for a, need in zip(leaves, needed, strict=True) if need]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        made = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        )
    return tuple(next(made) if need else None for need in needed)
