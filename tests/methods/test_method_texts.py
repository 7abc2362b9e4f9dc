"""Methods as written on the command line."""

import pytest

from holdfast.errors import HoldfastError
from holdfast.methods import FedKA, parse_method


def test_a_list_may_stand_among_options():
    assert parse_method("fedka:beta=0.1,shared=[3,1,2],mu=4") == FedKA(beta=0.1, shared=(3, 1, 2), mu=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fedka:shared=3", "fedka: shared is 3; it must be a list of whole numbers"),
        ("fedka:shared=[0.5]", "must be a list of whole numbers"),
        ("fedka:shared=[3,1", r"'\[3' in method 'fedka:shared=\[3,1' is no number, list or word"),
        ("fedka:beta", "not of the form option=value"),
        ("fedka:strength=1", "unknown option of fedka 'strength'"),
        ("fedavg:beta=1", "fedavg has no options"),
        ("fedntd+fedntd", "names a method twice"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(HoldfastError, match=said):
        parse_method(text)
