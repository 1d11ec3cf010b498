"""Names and versions of models, and the folders in which their plans lie.

A folder of models holds ``NAME.plan``, which is version 1 of its name, and as the Open Inference
Protocol's servers have it ``NAME/VERSION/model.plan``. A version is a whole number; the newest is
the largest.
"""

from __future__ import annotations

import re
from pathlib import Path

from tessella.core.errors import ArtifactError, ServeError, UsageError

FIRST_VERSION = "1"
SUFFIX = ".plan"
MEMBER = "model.plan"
MOST_VERSIONS = 64  # of one name; a folder may hold more, of which the newest count

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_RESERVED = (".", "..", "stats")  # /v2/models/stats is a route


def check_name(name: str) -> str:
    """The name, checked: the only part of a request that may name a file, beside a version.

    Raises:
        UsageError: no model can have this name.
    """
    if not is_name(name):
        raise UsageError(
            "this cannot be the name of a model",
            seen=repr(name)[:140],
            fix="use 1 to 128 letters, digits, dots, dashes and underscores",
        )
    return name


def check_version(version: str) -> str:
    """The version, checked.

    Raises:
        UsageError: no model can have this version.
    """
    if not _VERSION.fullmatch(version):
        raise UsageError(
            "this cannot be a version of a model",
            seen=repr(version)[:60],
            fix="use a whole number from 1 to 999999999",
        )
    return version


def is_name(name: str) -> bool:
    """Whether a model can have this name."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def split_key(key: str) -> tuple[str, str]:
    """Name and version in ``NAME`` or ``NAME@VERSION``.

    Raises:
        UsageError: a name or version that no model can have.
    """
    name, has_version, version = key.partition("@")
    return check_name(name), check_version(version) if has_version else FIRST_VERSION


def newest(versions: dict[str, Path]) -> str:
    """The largest of versions."""
    return max(versions, key=int)


def plans_of(folder: Path) -> dict[str, Path]:
    """The plans of one model's folder, ``VERSION/model.plan``, by version: the newest few.

    Raises:
        ArtifactError: there are none.
    """
    found = _plans_below(folder, folder.resolve())
    if not found:
        raise ArtifactError(
            "there is no plan in this folder",
            seen=folder,
            fix=f"put plans into it as VERSION/{MEMBER}, for example 1/{MEMBER}; of a run or a "
            "checkpoint tessella compile makes one",
        )
    return found


def plans_in(folder: Path, name: str) -> dict[str, Path]:
    """The plans of a name in a folder of models, by version; a link that leads out of it is none.

    Args:
        folder: without links in its own path.
    """
    if not is_name(name):
        return {}
    alone = (folder / f"{name}{SUFFIX}").resolve()
    is_plan = alone.is_file() and alone.is_relative_to(folder)
    return ({FIRST_VERSION: alone} if is_plan else {}) | _plans_below(folder / name, folder)


def names_in(folder: Path) -> list[str]:
    """The names of which a folder of models has plans."""
    names = {p.name.removesuffix(SUFFIX) for p in folder.glob(f"*{SUFFIX}")}
    names |= {p.parent.parent.name for p in folder.glob(f"*/*/{MEMBER}")}
    return sorted(name for name in names if plans_in(folder, name))


def _plans_below(home: Path, within: Path) -> dict[str, Path]:
    paths = {p.parent.name: p.resolve() for p in home.glob(f"*/{MEMBER}")}
    found = [
        version
        for version, path in paths.items()
        if _VERSION.fullmatch(version) and path.is_file() and path.is_relative_to(within)
    ]
    return {v: paths[v] for v in sorted(found, key=int)[-MOST_VERSIONS:]}


def unknown_model(name: str) -> ServeError:
    """The error of a request for a model that is not there."""
    return ServeError(
        "there is no such model",
        status=404,
        seen=repr(name)[:140],
        fix="GET /v2/models lists the loaded models, POST /v2/repository/index all",
    )


def unknown_version(name: str, version: str | None) -> ServeError:
    """The error of a request for a version that is not there."""
    return ServeError(
        f"model {name!r} has no such version",
        status=404,
        seen=repr(version)[:40],
        fix=f"GET /v2/models/{name} lists those that are ready; or leave it out, for the newest",
    )
