"""What comes from another machine is either what was sent or a named error."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast.engine.trees import leaves
from holdfast.engine.wire import DTYPES, Packed, WireError, form_of, pack, unpack

INPUTS = int(os.environ.get("HOLDFAST_FUZZ", "30000"))  # docs/reliability.md was written with a million

TREE = {
    "params": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3)},
    "counts": torch.tensor([3, 4]),
    "known": torch.tensor([True, False]),
    "one": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
}

numbers = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)
trees = st.recursive(
    numbers.map(torch.from_numpy),
    lambda inner: st.dictionaries(st.text("abc.:_ 1", min_size=1, max_size=4), inner, min_size=1, max_size=3),
    max_leaves=6,
).filter(lambda tree: isinstance(tree, dict))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = dict(leaves(one)), dict(leaves(other))
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and a[k].numpy().tobytes() == b[k].numpy().tobytes()
        for k in a
    )


@settings(max_examples=150, deadline=None)
@given(trees)
def test_what_is_unpacked_is_what_was_packed(tree: dict[str, Any]) -> None:
    assert same(unpack(pack(tree)), tree)
    assert same(unpack(pack(tree), form_of(tree)), tree)


def test_the_content_is_numpys_own_format() -> None:
    for path, one in pack(TREE).items():
        read = np.load(io.BytesIO(one.data), allow_pickle=False)
        assert (read.dtype.name, read.shape) == (one.dtype, one.shape)
        assert np.array_equal(read, dict(leaves(TREE))[path].numpy())


def test_views_and_transposes_travel_by_value() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(unpack(pack({"t": whole.T}))["t"], whole.T)
    assert torch.equal(unpack(pack({"t": whole[:, 1]}))["t"], whole[:, 1])


def test_the_overhead_is_small() -> None:
    tree = {"w": torch.zeros(100, 100), "b": torch.zeros(100)}
    raw = sum(v.numel() * v.element_size() for v in tree.values())
    assert sum(len(one.data) for one in pack(tree).values()) <= 1.05 * raw


def changed(path: str, **values: Any) -> dict[str, Packed]:
    packed = pack(TREE)
    return packed | {path: replace(packed[path], **values)}


W = pack(TREE)["params/w"]
DAMAGED = {
    "wrong keys": [
        {k: v for k, v in pack(TREE).items() if k != "one"},
        pack(TREE) | {"extra": W},
    ],
    "wrong dtype": [
        changed("params/w", dtype="float64"),
        changed("params/w", dtype="object"),
        changed("params/w", dtype="int32"),
        changed("known", data=pack(TREE)["known"].data[:-1] + b"\x07"),
    ],
    "wrong shape": [
        changed("params/w", shape=(3, 2)),
        changed("params/w", shape=(6,)),
        changed("params/w", shape=(2**40, 2**40)),
    ],
    "wrong size": [
        changed("params/w", data=W.data[:-1]),
        changed("params/w", data=W.data + b"\0"),
        changed("params/w", data=b""),
        changed("params/w", data=b"\x80\x04K\x01." + W.data[5:]),
    ],
    "absurd size": [changed("params/w", data=bytes(1 << 20))],
}


@pytest.mark.parametrize(
    ("kind", "damaged"), [(kind, each) for kind, several in DAMAGED.items() for each in several]
)
def test_damage_is_named(kind: str, damaged: dict[str, Packed]) -> None:
    with pytest.raises(WireError) as raised:
        unpack(damaged, form_of(TREE))
    assert raised.value.kind == kind


@pytest.mark.parametrize(
    "odd",
    [
        {"": W},
        {"a//b": W},
        {"/a": W},
        {"a": W, "a/b": W},
        {"a/b/c": W, "a": W},
        {"x" * 2000: W},
        {"/".join("abcdefghijkl"): W},
        {"new\nline": W},
        {7: W},
        {"w": replace(W, shape=(2, -3))},
        {"w": replace(W, shape=(2, 3.0))},
        {"w": replace(W, shape=(2, True))},
        {"w": replace(W, shape=(1,) * 99)},
        {"w": replace(W, shape=(2**47,))},
    ],
)
def test_without_a_form_names_and_shapes_must_make_sense(odd: Any) -> None:
    with pytest.raises(WireError):
        unpack(odd)


def test_the_whole_is_bounded() -> None:
    with pytest.raises(WireError) as raised:
        unpack(pack(TREE), most_bytes=100)
    assert raised.value.kind == "absurd size"


def test_types_that_do_not_travel_are_refused_before_sending() -> None:
    with pytest.raises(Exception, match="does not travel"):
        pack({"z": torch.zeros(2, dtype=torch.complex64)})


def test_any_bytes_give_a_tree_or_the_one_error() -> None:
    """Random damage to real messages; nothing but `WireError` may come out, and what is accepted is whole."""
    rng = np.random.default_rng(0)
    whole, form = pack(TREE), form_of(TREE)
    paths, names = list(whole), [*DTYPES, "object", "<f4", "", "complex64", "float128", "void"]
    accepted = 0
    for turn in range(INPUTS):
        message = dict(whole)
        for _ in range(rng.integers(1, 4)):
            path = paths[rng.integers(len(paths))]
            one = message.get(path, W)
            match rng.integers(7):
                case 0:
                    data = bytearray(one.data or b"x")
                    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
                    message[path] = replace(one, data=bytes(data))
                case 1:
                    message[path] = replace(one, data=one.data[: rng.integers(len(one.data) + 1)])
                case 2:
                    message[path] = replace(one, data=rng.bytes(rng.integers(300)))
                case 3:
                    shape = tuple(int(n) for n in rng.integers(-2, 2 ** rng.integers(2, 60), rng.integers(5)))
                    message[path] = replace(one, shape=shape)
                case 4:
                    message[path] = replace(one, dtype=names[rng.integers(len(names))])
                case 5:
                    message.pop(path, None)
                case 6:
                    message[path + "/" * rng.integers(3) + "ab/"[: rng.integers(4)]] = one
        try:
            tree = unpack(message, form if turn % 2 else None)
        except WireError:
            continue
        accepted += 1
        assert {p: v.shape for p, v in leaves(tree)} == {p: one.shape for p, one in message.items()}
    assert 0 < accepted < INPUTS  # flipped bits of the values themselves are nobody's business here
