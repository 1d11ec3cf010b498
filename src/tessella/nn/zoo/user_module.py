"""``file.py:Class``: the user's own module, from one Python file that stands alone.

The class is called with those of these keyword arguments that its ``__init__`` names::

    classes, channels, height, width, size=(height, width), and Network.options

A checkpoint carries the file's text. Text that came with a checkpoint runs only if the same text
lies at that path on this machine, or if the user says that it is trusted.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError

T = TypeVar("T")


def split_name(name: str) -> tuple[Path, str]:
    """``net.py:Class`` as the path and the name of the class."""
    path, _, class_name = name.rpartition(":")
    if not path.endswith(".py") or not class_name.isidentifier():
        raise UsageError(
            "a module of your own is named as file.py:Class", seen=name, fix="name file and class"
        )
    return Path(path), class_name


def build(network: Network, *, trust_code: bool) -> nn.Module:
    """The user's module with fresh weights.

    Raises:
        UsageError: the code is not trusted, does not run, or its class cannot be called like this.
    """
    path, class_name = split_name(network.name)
    source = network.source
    if source is None:
        raise UsageError(
            f"the network {network.name} comes without its source",
            seen="Network.source is empty",
            fix="make the record with nn.zoo.network(), which reads the file",
        )
    if not trust_code:
        _require_same_text(path, source)
    cls = _find_class(_run(path, source), class_name, path)
    return _called(cls, network)


def call(network: Network) -> nn.Module:
    """The module that a class or function of a file makes; only for a file that the user named.

    Raises:
        UsageError: the file does not run, or makes no torch module.
    """
    path, name = split_name(network.name)
    module = _run(path, network.source or "")
    function = vars(module).get(name)
    made: object
    if isinstance(function, types.FunctionType):
        made = _called(function, network)
    else:
        made = _called(_find_class(module, name, path), network)
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"{network.name} makes no torch module",
            seen=type(made).__name__,
            fix="name a class that extends nn.Module, or a function that returns such a module",
        )
    return made


def _called(maker: Callable[..., T], network: Network) -> T:
    arguments = _arguments(maker, network)
    try:
        return maker(**arguments)
    except Exception as error:
        raise UsageError(
            f"{network.name} raised an error when it was made",
            seen=f"{type(error).__name__}: {error}; called with {arguments}",
            fix="correct it",
        ) from error


def _require_same_text(path: Path, source: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != source:
        state = "another text lies there" if path.is_file() else "no such file here"
        raise UsageError(
            "this checkpoint brings Python code, which runs with all your rights when it is built",
            seen=f"code of {path}, {state}",
            fix="read network.source in checkpoint.json; if you trust it, say trust_code=True "
            "(--trust-code), or put that text at that path",
        )


def _run(path: Path, source: str) -> types.ModuleType:
    """Run the file as a Python module, registered so that dataclasses and tracebacks find it."""
    module = types.ModuleType(f"tessella_user_{hashlib.sha256(source.encode()).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        raise UsageError(
            f"{path} could not be run",
            seen=f"{type(error).__name__}: {error}",
            fix="correct it; the file has to stand alone, without imports of files beside it",
        ) from error
    return module


def _find_class(module: types.ModuleType, class_name: str, path: Path) -> type[nn.Module]:
    """The class, if it is a torch module that this very file defines.

    Nothing else may be called: a record that names ``subprocess.py:call`` must not run a command.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    }
    if class_name not in own:
        raise UsageError(
            f"{path} defines no torch module of that name",
            seen=class_name,
            fix=f"use one of {', '.join(own)}" if own else "define a class that extends nn.Module",
        )
    return own[class_name]


def _arguments(cls: Callable[..., Any], network: Network) -> dict[str, Any]:
    """The keyword arguments that a class or function names, and every option."""
    offered = {
        "classes": network.classes,
        "channels": network.channels,
        "height": network.height,
        "width": network.width,
        "size": network.sides,
    }
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [o for o in network.options if o not in parameters and not takes_any]
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)
        and (p.kind is p.POSITIONAL_ONLY or name not in {**offered, **network.options})
    ]
    if unknown or missing:
        raise UsageError(
            f"{network.name} cannot be called like this",
            seen=f"{cls.__name__}{inspect.signature(cls)}, "
            f"{'unknown option' if unknown else 'no value for'} {', '.join(unknown or missing)}",
            fix=f"it may take {', '.join(offered)}; give everything else as an option",
        )
    return {k: v for k, v in offered.items() if k in parameters or takes_any} | network.options
