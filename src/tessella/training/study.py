"""The trials of a sweep in Optuna's storage: values are proposed, scores kept, hopeless ones found.

Optuna is an extra: ``pip install tessella[sweep]``. Its SQLite file is all that a sweep needs to go
on after a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessella.artifacts.sweep import Axis, Scalar, SweepInfo, Trial, TrialState, ranked
from tessella.core.errors import UsageError

if TYPE_CHECKING:
    import optuna

FILE = "sweep.db"
ERROR, SPENT = "error", "seconds"  # of a trial's attributes
HALVING = 3  # of so many trials one goes on, after 1, 3, 9, … validations
ENOUGH = 4  # trials with a score before an importance means anything


def require_optuna() -> Any:
    """The library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "a sweep needs Optuna, which is not installed",
            seen=str(error),
            fix="pip install 'tessella[sweep]', or: pip install optuna",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """A sweep's trials, as Optuna keeps them.

    Args:
        folder: the sweep's.
        first: values to try first: those of the default recipe.
    """

    def __init__(
        self, folder: Path, info: SweepInfo, *, first: Mapping[str, Scalar] | None = None
    ) -> None:
        self._optuna = require_optuna()
        self._axes, self._trials = info.axes, info.trials
        self._storage = self._optuna.storages.RDBStorage(f"sqlite:///{folder / FILE}")
        begun = len(self._storage.get_all_studies()) > 0
        self._study: optuna.Study = self._optuna.create_study(
            study_name="sweep",
            storage=self._storage,
            direction="maximize",
            load_if_exists=True,
            pruner=self._pruner(info),
        )
        # a resumed sampler must not draw again what it drew before
        seed = info.seed + len(self._study.trials)
        samplers = self._optuna.samplers
        kind = samplers.TPESampler if info.sampler == "tpe" else samplers.RandomSampler
        self._study.sampler = kind(seed=seed)
        if begun:
            return
        if info.sampler == "grid":
            for values in itertools.product(*(axis.choices for axis in self._axes)):
                self._enqueue(dict(zip((a.path for a in self._axes), values, strict=True)))
        elif first:
            self._enqueue(first)

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def ask(self) -> optuna.Trial | None:
        """A new trial; None where all have been asked for."""
        asked = [t for t in self._study.trials if t.state.name != "WAITING"]
        if len(asked) >= self._trials:
            return None
        return self._study.ask()

    def unfinished(self) -> list[optuna.Trial]:
        """Trials that were running when the sweep was stopped or killed."""
        running = (t for t in self._study.trials if t.state.name == "RUNNING")
        return [self._optuna.Trial(self._study, t._trial_id) for t in running]

    def values(self, trial: optuna.Trial) -> dict[str, Scalar]:
        """The settings of a trial, by path: drawn at the first call, the same at later ones."""
        return {axis.path: _suggested(trial, axis) for axis in self._axes}

    def report(self, trial: optuna.Trial, validation: int, score: float) -> bool:
        """Note the score of a validation (1, 2, …); True where the trial is to be ended."""
        known = self._frozen(trial).intermediate_values
        if validation not in known:
            trial.report(score, validation)
        return bool(trial.should_prune())

    def settle(
        self, trial: optuna.Trial, state: TrialState, seconds: float, error: str | None = None
    ) -> None:
        """End a trial: its score is the best of its validations."""
        trial.set_user_attr(SPENT, seconds)
        scores = self._frozen(trial).intermediate_values.values()
        if error is not None:
            trial.set_user_attr(ERROR, error)
        if state == "complete":
            self._study.tell(trial, max(scores))
            return
        # What failed is told as pruned: the sampler then keeps away, and would forget a failure.
        self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def trials(self) -> tuple[Trial, ...]:
        """All trials that began, the best first."""
        return ranked(_described(t) for t in self._study.trials if t.state.name != "WAITING")

    def described(self, trial: optuna.Trial) -> Trial:
        """A trial as it is by now."""
        return _described(self._frozen(trial))

    def importance(self) -> dict[str, float]:
        """The share of the scores' variance that each setting explains.

        A trial that was ended early counts with the score that it had reached.
        """
        optuna = self._optuna
        scored = [t for t in self._study.trials if t.intermediate_values]
        scores = [max(t.intermediate_values.values()) for t in scored]
        if len(scored) < ENOUGH or len(set(scores)) < 2:
            return {}
        alike = optuna.create_study(direction="maximize")
        for trial, score in zip(scored, scores, strict=True):
            alike.add_trial(
                optuna.trial.create_trial(
                    params=trial.params, distributions=trial.distributions, value=score
                )
            )
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return dict(optuna.importance.get_param_importances(alike, evaluator=evaluator))

    def _enqueue(self, values: Mapping[str, Scalar]) -> None:
        self._study.enqueue_trial(dict(values))

    def _frozen(self, trial: optuna.Trial) -> optuna.trial.FrozenTrial:
        return self._storage.get_trial(trial._trial_id)  # type: ignore[no-any-return]

    def _pruner(self, info: SweepInfo) -> optuna.pruners.BasePruner:
        pruners: Any = self._optuna.pruners
        if info.pruner == "none":
            return pruners.NopPruner()  # type: ignore[no-any-return]
        kind = pruners.SuccessiveHalvingPruner
        if info.pruner == "hyperband":
            kind = pruners.HyperbandPruner
        return kind(min_resource=1, reduction_factor=HALVING)  # type: ignore[no-any-return]


def _suggested(trial: optuna.Trial, axis: Axis) -> Scalar:
    if axis.choices:
        return trial.suggest_categorical(axis.path, axis.choices)
    low, high = axis.low, axis.high
    assert low is not None
    assert high is not None
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(axis.path, low, high, log=axis.log)
    return trial.suggest_float(axis.path, low, high, log=axis.log)


def _described(found: optuna.trial.FrozenTrial) -> Trial:
    error = found.user_attrs.get(ERROR)
    states: dict[str, TrialState] = {"RUNNING": "running", "COMPLETE": "complete"}
    scores: Sequence[float] = tuple(found.intermediate_values.values())
    return Trial(
        number=found.number,
        state=states.get(found.state.name, "pruned" if error is None else "failed"),
        values=dict(found.params),
        score=max(scores, default=None),
        validations=len(scores),
        seconds=float(found.user_attrs.get(SPENT, 0.0)),
        error=error,
    )
