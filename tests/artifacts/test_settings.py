"""One set of names for a recipe's settings, and what a wrong one is answered."""

from __future__ import annotations

import pytest

from tessella.artifacts.run import Solver
from tessella.artifacts.settings import spelled_out
from tessella.core.errors import UsageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lr": 0.1}, {"solver": {"lr": 0.1}}),
        ({"solver": "sgd", "lr": 0.1}, {"solver": {"name": "sgd", "lr": 0.1}}),
        ({"solver": {"name": "sgd", "lr": 1.0}, "lr": 0.1}, {"solver": {"name": "sgd", "lr": 0.1}}),
        ({"policy": "step", "epochs": 3}, {"policy": {"name": "step"}, "epochs": 3}),
    ],
)
def test_short_forms(given, expected):
    assert spelled_out(given) == expected


def test_a_record_takes_a_rate_beside_it():
    whole = spelled_out({"solver": Solver(name="adam", momentum=0.5), "lr": 0.2})["solver"]
    expected = {"name": "adam", "lr": 0.2, "momentum": 0.5, "weight_decay": 1e-4}
    assert whole == expected | {"centralize": False}


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ({"epoch": 3}, "use epochs"),
        ({"batchsize": 3}, "use batch_size"),
        ({"learning_rate": 3}, "use lr"),
        ({"optimizer": "sgd"}, "use solver"),
        ({"momentum": 0.9}, "use solver={'momentum': …}"),
        ({"wd": 0.9}, "use solver={'weight_decay': …}"),
        ({"warm-up": 0.1}, "use policy={'warmup': …}"),
        ({"flip": True}, "use augment={'flip': …}"),
        ({"solver": {"learning_rate": 0.1}}, "use 'lr'"),
        ({"policy": {"warm_up": 0.1}}, "use 'warmup'"),
        ({"zzz": 1}, "use one of network, dataset, epochs"),
        ({"foo": 1}, "use one of network, dataset, epochs"),
        ({"epoch": 3, "seeds": 1}, "use epochs; use seed"),
    ],
)
def test_a_wrong_name_is_answered_with_the_one_meant(wrong, meant):
    with pytest.raises(UsageError, match="unknown") as caught:
        spelled_out(wrong)
    assert caught.value.fix is not None
    assert caught.value.fix.startswith(meant)
