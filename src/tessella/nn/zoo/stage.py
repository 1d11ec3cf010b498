"""The stages of a network: its parts in order, from the input to the head.

Fine-tuning treats them differently: the first ones see edges and colours, which are much the same
everywhere, the last ones what a network was trained for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A block, or a layer outside of any, with the norms that follow it.

    Attributes:
        modules: its parts by name; a parameter of the network itself is in none.
        parameters: names of its parameters.
    """

    modules: dict[str, nn.Module]
    parameters: tuple[str, ...]


def stages(module: nn.Module) -> tuple[Stage, ...]:
    """The stages of a network in the order in which it names its parts; the last one is its head.

    Lists of layers are opened (``nn.Sequential`` and its kin), blocks are not: a ResNet-18 has ten,
    its stem, eight blocks and its head.
    """
    found: list[Stage] = []
    waiting: tuple[str, ...] = ()  # parameters of the network itself: they go with what follows
    for name, part, own in _parts(module, ""):
        sizes = dict(part.named_parameters(recurse=not own))
        names = tuple(f"{name}.{inner}".removeprefix(".") for inner in sizes)
        if own:
            waiting += names
            continue
        stage = Stage(modules={name: part}, parameters=waiting + names)
        if found and not waiting and all(p.ndim <= 1 for p in sizes.values()):
            before = found.pop()
            stage = Stage(
                modules={**before.modules, name: part}, parameters=before.parameters + names
            )
        waiting = ()
        found.append(stage)
    if waiting:
        found.append(Stage(modules={}, parameters=waiting))
    return tuple(found)


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Name and module of each part with parameters; True: only its own, not its children's."""
    children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
    if not children:
        if any(True for _ in module.parameters()):
            yield name, module, False
        return
    if any(True for _ in module.parameters(recurse=False)):
        yield name, module, True
    for inner, child in children:
        path = f"{name}.{inner}".removeprefix(".")
        if isinstance(child, _LISTS) or len(children) == 1:
            yield from _parts(child, path)
        else:
            yield path, child, False
