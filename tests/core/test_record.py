"""Records survive JSON exactly, and what is not a record is refused with its path."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessella.core.errors import CorruptArtifact, UsageError
from tessella.core.record import canonical_json, digest, from_plain, parse_json, same_json, to_plain


@dataclass(frozen=True, kw_only=True)
class Leaf:
    text: str
    mode: Literal["a", "b", 1]
    maybe: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tree:
    number: int
    real: float
    flag: bool
    pair: tuple[int, str]
    many: tuple[float, ...]
    names: dict[str, Leaf]
    either: int | Leaf
    rest: tuple[Leaf, ...] = ()

    def __post_init__(self) -> None:
        if self.number == 13:
            raise UsageError("thirteen is refused")


leaves = st.builds(
    Leaf,
    text=st.text(),
    mode=st.sampled_from(["a", "b", 1]),
    maybe=st.none() | st.integers(),
)
reals = st.floats(allow_nan=False, allow_infinity=False)
trees = st.builds(
    Tree,
    number=st.integers().filter(lambda n: n != 13),
    real=reals,
    flag=st.booleans(),
    pair=st.tuples(st.integers(), st.text()),
    many=st.lists(reals).map(tuple),
    names=st.dictionaries(st.text(), leaves, max_size=3),
    either=st.integers() | leaves,
    rest=st.lists(leaves, max_size=3).map(tuple),
)


@given(trees)
def test_a_record_survives_json(tree: Tree) -> None:
    text = canonical_json(tree)
    back = from_plain(Tree, parse_json(text, where="t"), where="t")
    assert back == tree
    assert canonical_json(back) == text
    assert digest(back) == digest(tree)


@given(trees, st.data())
def test_a_field_of_another_type_is_refused_or_equal(tree: Tree, data: st.DataObject) -> None:
    """Whatever one field is replaced by: an error that names it, or a record that says the same."""
    plain = to_plain(tree)
    name = data.draw(st.sampled_from(sorted(plain)))
    plain[name] = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
            ),
            max_leaves=5,
        )
    )
    try:
        back = from_plain(Tree, plain, where="tree")
    except CorruptArtifact as error:
        told = error.wrong
    else:
        told = "tree"
        assert to_plain(back) == plain
    assert told.startswith("tree")


PLAIN = {
    "number": 1,
    "real": 0.5,
    "flag": True,
    "pair": [1, "x"],
    "many": [],
    "names": {},
    "either": 2,
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"number": True}, "tree.number"),
        ({"number": 1.0}, "tree.number"),
        ({"number": 13}, "thirteen"),
        ({"real": 10**400}, "tree.real"),
        ({"real": "1"}, "tree.real"),
        ({"flag": 1}, "tree.flag"),
        ({"pair": [1]}, "tree.pair"),
        ({"pair": [1, 2]}, "tree.pair[1]"),
        ({"names": {"x": {"text": "", "mode": True}}}, "tree.names.x.mode"),
        ({"names": {"x": {"text": ""}}}, "mode missing"),
        ({"either": {"text": 1, "mode": "a"}}, "tree.either.text"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_the_error_names_the_place(change: dict[str, object], told: str) -> None:
    with pytest.raises(CorruptArtifact) as caught:
        from_plain(Tree, {**PLAIN, **change}, where="tree")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        "[NaN]",
        "[Infinity]",
        "[" * 100_000,
        "{",
        "9" * 5000,
        b"\xff\xfe",
        "[1e999]",
        '["\\ud800"]',
        b'{"\\uDFFF": 1}',
        "[" * 65 + "]" * 65,
    ],
)
def test_odd_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(CorruptArtifact, match="valid JSON"):
        parse_json(text, where="file")


def test_a_character_in_two_halves_is_one() -> None:
    assert parse_json(canonical_json(["\U0001f600"]), where="file") == ["\U0001f600"]


def test_canonical_json_is_sorted_and_finite() -> None:
    assert canonical_json({"b": 1, "a": [0.1, None]}) == '{"a":[0.1,null],"b":1}'
    assert json.loads(canonical_json({"x": 1e-300})) == {"x": 1e-300}
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"x": float("nan")})
    with pytest.raises(TypeError, match="set"):
        to_plain({"x": {1}})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1, "b": [2.5, None]}, {"b": [2.5, None], "a": 1}, True),
        ([1, 2], (1, 2), True),
        (1, 1.0, False),
        (1, True, False),
        ({"a": 0}, {"a": False}, False),
        ("1", 1, False),
    ],
)
def test_values_are_the_same_where_their_texts_are(one, other, same):
    assert same_json(one, other) is same
