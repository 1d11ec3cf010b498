"""The programs of a plan that are not bound yet: each is when its batch size is first asked for.

To bind one of DenseNet-121's six takes as long as all else that loading does; most callers use one
or two. What a program may not do is asked when it is bound: none runs unchecked.
"""

from __future__ import annotations

from tessella.artifacts.plan import Plan
from tessella.device.packing import side_by_side
from tessella.device.x86 import code
from tessella.execution.bucket import BoundBucket
from tessella.execution.steps import Binder
from tessella.kernels import catalog
from tessella.runtime import lifetimes


class Binders:
    """What programs are bound with.

    Attributes:
        plan: what they are the programs of.
        of: by batch size, those that are not bound.
    """

    def __init__(self, plan: Plan, of: dict[int, Binder]) -> None:
        self.plan, self.of = plan, of

    def bound(self, batch: int) -> BoundBucket:
        """The program of a batch size, which is not asked for again.

        Raises:
            ArtifactError: a step cannot be bound to its kernel, or would overwrite what is needed.
        """
        binder = self.of[batch]
        with side_by_side():
            made = BoundBucket(binder)
        problems = [step.problem for step in made.steps]
        lifetimes.check(self.plan.program, binder.bucket, problems)
        del self.of[batch]
        return made


def require_instructions(plan: Plan) -> None:
    """See that this processor has all instructions that the steps' machine code is written in.

    Of two processors with vectors as wide one may lack VNNI or AMX, and a plan's fingerprint fits
    both.

    Raises:
        WrongDevice: it has not; the message has the command that builds the plan again.
    """
    about = plan.manifest
    for kernel in sorted({step.kernel for b in plan.program.buckets for step in b.steps}):
        row = catalog.BY_ID.get(kernel)  # others are told of where they are bound
        if row is None or row.isa is None or not row.runs_on(about.fingerprint.target):
            continue
        if reason := code.refusal(row.isa):
            seen = f"{kernel}: {reason}"
            raise about.fingerprint.lacking(seen, rebuild=about.rebuild, targets=plan.targets)
