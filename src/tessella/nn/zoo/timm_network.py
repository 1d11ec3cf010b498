"""``timm/NAME``: any network of the timm library.

The import of timm takes as long as torch's, so it happens when a network of timm is built; so does
that of httpx, by which timm fetches.
"""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError, first_line

TIMM = "timm/"

# What we set ourselves, and what would make timm read (and unpickle) a file of someone's choice.
RESERVED = ("num_classes", "in_chans", "img_size", "features_only", "checkpoint_path", "cache_dir")


def names() -> list[str]:
    """Every network of timm."""
    import timm

    known: list[str] = timm.list_models()
    return known


def require_known(name: str) -> None:
    """Raise ``UsageError`` with near matches unless timm has a network of this name."""
    import timm

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, names(), n=5)
        raise UsageError(
            "timm has no network of this name",
            seen=f"timm/{name}",
            fix=f"use {' or '.join(f'timm/{n}' for n in near)}"
            if near
            else "see timm.list_models()",
        )


def default_input(name: str) -> tuple[int, int, int]:
    """Channels, height and width that timm gives for a network; 3×224×224 where it gives none."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return (3, 224, 224) if config is None else tuple(config.input_size)


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network with fresh weights, or with timm's, the head aside where classes differ.

    Raises:
        UsageError: an unknown name or option, an input size that the network cannot take, or
            pretrained weights that cannot be fetched.
    """
    import httpx
    import timm

    name, options = record.name.removeprefix(TIMM), record.options
    require_known(name)
    if bad := [o for o in options if o in RESERVED or o.startswith("pretrained")]:
        raise UsageError(
            f"timm/{name} does not take this as an option",
            seen=", ".join(bad),
            fix="leave it out; classes, channels, size and pretrained have arguments of their own",
        )
    channels, height, width = record.channels, record.height, record.width
    arguments: dict[str, Any] = {
        "num_classes": record.classes, "in_chans": channels, "pretrained": pretrained, **options
    }  # fmt: skip
    try:
        try:
            module: nn.Module = timm.create_model(name, **arguments, img_size=(height, width))
        except TypeError as error:
            if "'img_size'" not in str(error):
                raise
            module = timm.create_model(name, **arguments)  # convolutional: takes any size
    except (OSError, httpx.HTTPError) as error:
        raise _unfetched(name, error) from error
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(
            f"timm cannot build {name} like this",
            seen=f"{first_line(error)} (input {channels}×{height}×{width}, options {options})",
            fix="change the input size or the options",
        ) from error
    return module


def pyramid(
    name: str, *, channels: int, pretrained: bool
) -> tuple[nn.Module, list[tuple[int, int]]]:
    """A network of timm without its head, which returns the features of every size it has.

    Args:
        name: as timm has it, or with ``timm/`` before it, as networks are called elsewhere.

    Returns:
        The module, and of each of its results, fine to coarse, how many times smaller than the
        picture it is, and its channels.

    Raises:
        UsageError: an unknown name, one without such features, or weights that cannot be fetched.
    """
    import httpx
    import timm

    name = name.removeprefix("timm/")
    require_known(name)
    try:
        module = timm.create_model(
            name, features_only=True, in_chans=channels, pretrained=pretrained
        )
    except (OSError, httpx.HTTPError) as error:
        raise _unfetched(name, error) from error
    except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError) as error:
        raise UsageError(
            f"timm/{name} cannot be a backbone",
            seen=first_line(error),
            fix="take a convolutional one, such as resnet18 or mobilenetv3_large_100",
        ) from error
    info = module.feature_info
    return module, list(zip(info.reduction(), info.channels(), strict=True))


def _unfetched(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"the pretrained weights of timm/{name} could not be fetched",
        seen=first_line(error),
        fix="go online once (the file is cached), or start from random weights or a checkpoint",
    )
