"""Locks: the measurements that decided an earlier plan, and the receipt of that plan."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

from tessella.artifacts.plan import Plan, load_plan, to_bytes
from tessella.core.errors import UsageError


def lines_of(lock: Plan | str | Path) -> str:
    """The lines of a lock, from a plan, its file, or a file with these lines alone.

    Those of all programs of a plan: each line names its device.
    """
    if isinstance(lock, Plan):
        programs = (lock, *lock.others)
        if all(p.manifest.untuned for p in programs):
            raise UsageError(
                "nothing was measured for this plan, so that it has no lock",
                seen="an untuned plan",
                fix="measure it where it runs, tessella tune PLAN, and take it then",
            )
        return "".join(p.lock for p in programs)
    if not Path(lock).is_file():
        raise UsageError("there is no lock here", seen=lock, fix="give a plan or its lock")
    if zipfile.is_zipfile(lock):
        return lines_of(load_plan(lock))
    return Path(lock).read_text(encoding="utf-8", errors="replace")


def chosen_by_budget(lock: Plan | str | Path | None) -> Plan | None:
    """The plan behind a lock, if a budget chose its precisions."""
    if isinstance(lock, str | Path) and zipfile.is_zipfile(lock):
        lock = load_plan(lock)
    return lock if isinstance(lock, Plan) and lock.manifest.receipt is not None else None


def as_judged(plan: Plan, judged: Plan) -> Plan:
    """The plan with the receipt of ``judged``, if the two are otherwise equal byte for byte."""
    known = judged.manifest
    manifest = replace(plan.manifest, receipt=known.receipt, rebuild=known.rebuild)
    same = replace(plan, manifest=manifest)
    return same if to_bytes(same) == to_bytes(judged) else plan
