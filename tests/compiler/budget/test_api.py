"""``compile(..., budget=, data=)``: the plan that was chosen, and the same one again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessella import api
from tessella.artifacts.plan import to_bytes
from tessella.compiler.budget import Labelled
from tessella.core.errors import UsageError
from tests.support.digits import IMAGE, Net


def test_compile_takes_a_budget_and_a_lock_brings_the_plan_back(
    net: Net, judging: Labelled, cache: Path
) -> None:
    given = {"batch": 16, "target": "cpu", "inputs": [IMAGE], "cache": cache}
    front = api.pareto(net, data=judging, budget=1.0, **given)
    plan = front.plan
    assert plan.manifest.receipt is not None
    assert "budget=1.0, data=data" in plan.manifest.rebuild
    again = api.compile(net, lock=plan, calibration=front.calibration, **given)
    assert to_bytes(again) == to_bytes(plan)
    with pytest.raises(UsageError, match="labelled data"):
        api.compile(net, budget=0.3, **given)
    with pytest.raises(UsageError, match="percentage points"):
        api.compile(net, budget=-1.0, data=judging, **given)
    with pytest.raises(UsageError, match="cannot be spent"):
        api.compile(net, budget=1.0, data=judging, precision="fp8", **given)
