"""YAML by version 1.2, where PyYAML implements 1.1."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import yaml12
from holdfast.core.errors import HoldfastError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("2026-01-31", "2026-01-31"), ("yes", "yes"), ("off", "off"), ("1_000", "1_000"),
        ("1e-3", 1e-3), ("-2.5E+2", -250.0), (".5", 0.5), ("010", 10), ("0o17", 15), ("0xfF", 255), ("-3", -3),
        ("true", True), ("FALSE", False), ("~", None), ("", None), ("null", None), (".inf", math.inf), ("<<", "<<"),
        ("[1, 1e2, no]", [1, 100.0, "no"]), ('"1"', "1"),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    found = yaml12.load(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["!!int x", "!!bool 3", "!!timestamp z", "!!python/name:os.system", "[", "a: b: c", "\0"]
)
def test_everything_else_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d|tag"):
        yaml12.load(text)


def test_a_key_that_is_given_twice_is_named() -> None:
    with pytest.raises(HoldfastError, match="'a' is given twice, the second time in line 2"):
        yaml12.load("a: 1\na: 2\n")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(st.dictionaries(st.text(), trees, max_size=4))
def test_both_versions_read_what_is_written(value: dict[str, object]) -> None:
    written = yaml12.dump(value)
    assert yaml12.load(written) == value
    assert yaml.safe_load(written) == value


@pytest.mark.parametrize("text", ["1e3", "1:30", "yes", "0o17", "2026-01-31", "~", "=", "12e4"])
def test_texts_that_look_like_values_are_quoted(text: str) -> None:
    for load in (yaml12.load, yaml.safe_load):
        assert load(yaml12.dump({"a": text})) == {"a": text}
