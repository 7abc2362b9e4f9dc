"""One parser and one validator, against values written out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import (
    Count,
    Fraction,
    Momentum,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveFraction,
    Range,
    build,
    either,
    option_type,
    parse_options,
    parse_text,
    validate,
    validate_fields,
)
from holdfast.methods import METHODS, method_from, parse_method


@pytest.mark.parametrize(
    ("hint", "value", "converted"),
    [
        (bool, True, True),
        (int, 3, 3),
        (float, 3, 3.0),
        (float | None, None, None),
        (Positive | None, 2, 2.0),
        (Literal["a", "b"], "b", "b"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[PositiveCount, ...], (64, 32), (64, 32)),
        (str | Mapping[str, Any], {"name": "iid"}, {"name": "iid"}),
        (Momentum, 0, 0.0),
        (Any, {1}, {1}),
    ],
)
def test_a_valid_value_has_the_type_of_its_hint(hint: Any, value: Any, converted: Any) -> None:
    found = validate("x", value, hint)
    assert found == converted
    assert type(found) is type(converted)


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (bool, 1, "true or false"),
        (int, True, "a whole number"),
        (int, 2.0, "a whole number"),
        (float, "2", "a number"),
        (float, float("nan"), "a number"),
        (float, None, "a number"),
        (str, 3, "text"),
        (Literal["a", "b", "c"], "d", "a, b or c"),
        (Literal["a"], ["a"], "a"),
        (tuple[int, ...], [0.5], "a list of whole numbers, such as [4,17]"),
        (tuple[PositiveCount, ...], [0], "a list of whole numbers, each at least 1, such as [4,17]"),
        (str | Mapping[str, Any], 3, "text or a mapping"),
        (Count, -1, "at least 0"),
        (PositiveCount, 0, "at least 1"),
        (Positive, 0, "above 0"),
        (NonNegative, -0.5, "at least 0"),
        (Fraction, 1.5, "between 0 and 1"),
        (PositiveFraction, 0, "above 0 and at most 1"),
        (Momentum, 1, "from 0 up to, but not, 1"),
        (Annotated[int, Range(ge=1, unit="client a round")] | None, 0, "at least 1 client a round"),
    ],
)
def test_an_invalid_value_is_named_with_what_is_valid(hint: Any, value: Any, wanted: str) -> None:
    with pytest.raises(HoldfastError) as error:
        validate("x", value, hint)
    said = str(error.value)
    assert said.startswith("x is ")
    assert said.endswith(f"it must be {wanted}")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_range_contains_what_its_bounds_allow(value: float) -> None:
    assert (value in Range(ge=0, lt=1)) == (0 <= value < 1)
    assert (value in Range(gt=-2, le=3)) == (-2 < value <= 3)


def test_text_is_split_at_commas_outside_of_brackets() -> None:
    found = parse_text("name: a=1, b=[[1,2],[3]],c=on,d=1e-3,e=none,f=true,g=word", "thing")
    assert found == {
        "name": "name", "a": 1, "b": [[1, 2], [3]], "c": "on", "d": 1e-3, "e": None, "f": True, "g": "word",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x:0.1,alpha=0.2", "alpha is given twice"),
        ("x:alpha=1,alpha=1", "alpha is given twice"),
        ("x:1,2", "'2' in thing 'x:1,2' takes at most 1 values without a name"),
        ("x:alpha=[1", "'[1' in thing 'x:alpha=[1' is not a number, a list or a word"),
    ],
)
def test_text_that_is_ambiguous_or_broken_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(HoldfastError) as error:
        parse_text(text, "thing", ("alpha",))
    assert sentence in str(error.value)


def test_values_need_names_without_positional_options() -> None:
    with pytest.raises(HoldfastError, match="'3' in skew is not of the form option=value"):
        parse_options("3", "skew")


@dataclass(frozen=True)
class Thing:
    name = "thing"
    size: PositiveCount
    kind: Literal["plain", "other"] = "plain"

    def __post_init__(self) -> None:
        validate_fields(self, self.name)


def test_descriptions_are_built_and_checked() -> None:
    assert build({"thing": Thing}, {"name": "thing", "size": 3}, "object") == Thing(3)
    for description, sentence in (
        ({"size": 3}, "a object needs a name"),
        ({"name": "thong"}, "unknown object 'thong'; did you mean thing"),
        ({"name": "thing"}, "object thing needs size"),
        ({"name": "thing", "sise": 3}, "unknown option of thing 'sise'; did you mean size"),
        ({"name": "thing", "size": "big"}, "thing: size is 'big'; it must be a whole number"),
    ):
        with pytest.raises(HoldfastError, match=sentence):
            build({"thing": Thing}, description, "object")


def test_a_class_within_a_function_is_validated_by_its_simple_types() -> None:
    class Unit:
        pass

    @dataclass(frozen=True)
    class Local:
        unit: Unit
        count: int = 1

    validate_fields(Local(Unit(), 2), "local")
    with pytest.raises(HoldfastError, match=r"local: count is 'two'; it must be a whole number"):
        validate_fields(Local(Unit(), "two"), "local")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_back_from_its_description(name: str) -> None:
    method = METHODS[name]()
    assert method_from(method.describe()) == method
    assert parse_method(name) == method


def test_command_lines_take_the_narrowest_type() -> None:
    assert [option_type(hint) for hint in (bool, PositiveCount | None, Positive, str | None)] == [
        bool, int, float, str,
    ]  # fmt: skip


def test_a_choice_in_words() -> None:
    assert either(["a"]) == "a"
    assert either(["a", "b"]) == "a or b"
    assert either(["a", "b", "c"]) == "a, b or c"
