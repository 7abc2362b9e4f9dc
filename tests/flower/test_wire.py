"""Received tensors are either those that were sent or a `WireError`."""

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

from holdfast.core.trees import leaves
from holdfast.flower.wire import DTYPES, PackedArray, WireError, pack, spec_of, unpack

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
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and a[k].numpy().tobytes() == b[k].numpy().tobytes()
        for k in a
    )


@settings(max_examples=150, deadline=None)
@given(trees)
def test_what_is_unpacked_is_what_was_packed(tree: dict[str, Any]) -> None:
    assert same(unpack(pack(tree)), tree)
    known = unpack(pack(tree), spec_of(tree))
    assert same(known, tree)
    assert list(spec_of(known)) == list(spec_of(tree))


def test_each_dtype_is_one_array_in_numpys_own_format() -> None:
    tensors = dict(leaves(TREE))
    packed = pack(TREE)
    assert [one.dtype for one in packed.values()] == ["float32", "int64", "bool", "float64"]
    for manifest, one in packed.items():
        read = np.load(io.BytesIO(one.data), allow_pickle=False)
        assert (read.dtype.name, read.shape) == (one.dtype, one.shape)
        paths = [line.rpartition(" ")[0] for line in manifest.split("\n")]
        assert np.array_equal(read, np.concatenate([tensors[path].numpy().ravel() for path in paths]))


def test_the_manifest_is_short_and_plain() -> None:
    assert next(iter(pack(TREE))) == "params/w 2,3\nparams/b 3\nnone 0,4"


def test_tensors_do_not_keep_each_other_in_memory() -> None:
    tree = unpack(pack({"large": torch.zeros(1000), "small": torch.zeros(1)}))
    assert tree["small"].untyped_storage().nbytes() == 4


def test_views_and_transposes_are_sent_by_value() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(unpack(pack({"t": whole.T}))["t"], whole.T)
    assert torch.equal(unpack(pack({"t": whole[:, 1]}))["t"], whole[:, 1])


def test_the_overhead_is_small() -> None:
    tree = {"w": torch.zeros(100, 100), "b": torch.zeros(100)}
    raw = sum(v.numel() * v.element_size() for v in tree.values())
    assert sum(len(one.data) for one in pack(tree).values()) <= 1.05 * raw


MANIFESTS = {one.dtype: manifest for manifest, one in pack(TREE).items()}
FLOATS, KNOWN = pack(TREE)[MANIFESTS["float32"]], pack(TREE)[MANIFESTS["bool"]]


def changed(dtype: str, manifest: str | None = None, /, **values: Any) -> dict[str, PackedArray]:
    """The message with another manifest or other content for one dtype."""
    return {
        (manifest if manifest is not None and one.dtype == dtype else name): (
            replace(one, **values) if one.dtype == dtype else one
        )
        for name, one in pack(TREE).items()
    }


def without(dtype: str) -> dict[str, PackedArray]:
    return {manifest: one for manifest, one in pack(TREE).items() if one.dtype != dtype}


DOUBLES = {name: value.double() for name, value in TREE["params"].items()}
EMPTY = pack({"z": torch.zeros(0)})["z 0"]
DAMAGED = {
    "wrong keys": [
        without("float64"),
        pack(TREE) | {"extra 0": EMPTY},
        changed("float32", "params/w 2,3\nparams/b 3"),
        changed("float32", "params/w 2,3\nparams/c 3\nnone 0,4"),
        changed("float32", "params/w 2,3\nparams/b 3\nnone 0,4\nnone 0,4"),
        changed("float32", "params/w 2,3\nparams/b 3\nparams/b 3\nnone 0,4"),
        changed("float32", "params/w 2,3\nparams/b 3\nnone 0,4\ncounts 0"),
        pack(TREE) | {"one ": pack(TREE)[MANIFESTS["float64"]], "one 1": EMPTY},
    ],
    "wrong dtype": [
        changed("float32", dtype="float64"),
        changed("float32", dtype="object"),
        changed("float32", dtype="int32"),
        pack(TREE | {"params": DOUBLES}),
        changed("bool", data=KNOWN.data[:-1] + b"\x07"),
        # params/b among the doubles
        changed("float32", "params/w 2,3\nnone 0,4")
        | {"params/b 3": pack({"b": torch.zeros(3, dtype=torch.float64)})["b 3"]},
    ],
    "wrong shape": [
        changed("float32", "params/w 3,2\nparams/b 3\nnone 0,4"),
        changed("float32", "params/w 6\nparams/b 3\nnone 0,4"),
        changed("float32", "params/w 2,4\nparams/b 1\nnone 0,4"),
        changed("float32", f"params/w {2**40},{2**40}\nparams/b 3\nnone 0,4"),
    ],
    "wrong size": [
        changed("float32", shape=(3, 3)),
        changed("float32", shape=(8,)),
        changed("float32", data=FLOATS.data[:-1]),
        changed("float32", data=FLOATS.data + b"\0"),
        changed("float32", data=FLOATS.data + FLOATS.data[-4:], shape=(10,)),
        changed("float32", data=b""),
        changed("float32", data=b"\x80\x04K\x01." + FLOATS.data[5:]),
    ],
    "absurd size": [
        changed("float32", data=bytes(1 << 20)),
        pack(TREE) | {"long" * 2000: EMPTY},
    ],
}


@pytest.mark.parametrize(
    ("kind", "damaged"), [(kind, each) for kind, several in DAMAGED.items() for each in several]
)
def test_damaged_messages_raise_errors(kind: str, damaged: dict[str, PackedArray]) -> None:
    with pytest.raises(WireError) as raised:
        unpack(damaged, spec_of(TREE))
    assert raised.value.kind == kind


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        " ",
        "0",
        " 0",
        "a",
        "a 0\n",
        "\na 0",
        "a//b 0",
        "/a 0",
        "a 0\na/b 0",
        "a/b/c 0\na 0",
        "a 0\nb 0\na 0",
        f"{'x' * 2000} 0",
        "/".join("abcdefghijkl") + " 0",
        "carriage\rreturn 0",
        "a\t0",
        "a -0",
        "a +0",
        "a 0.0",
        "a 0,",
        "a ,0",
        "a 0,,1",
        "a 0x1",
        "a 0 ,1",
        "a ٠",  # a digit, but not one of ours
        "a " + "0," * 98 + "0",
        f"a {2**40},{2**40},0",  # empty, but no array can have it
        f"a {'9' * 5000},0",
        f"a {2**47}",
        "a 1",
        "a ",  # a scalar
    ],
)
def test_invalid_manifests_raise_errors(manifest: str) -> None:
    with pytest.raises(WireError):
        unpack({manifest: EMPTY})


def test_a_manifest_is_bounded_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.flower.wire.MAX_MANIFEST", 7)
    assert unpack({"a 0\nb 0": EMPTY}).keys() == {"a", "b"}
    with pytest.raises(WireError) as raised:
        unpack({"a 0\nbb 0": EMPTY})
    assert raised.value.kind == "absurd size"


def test_one_group_may_be_unchecked() -> None:
    spec = {path: of for path, of in spec_of(TREE).items() if not path.startswith("params/")}
    assert same(unpack(pack(TREE), spec, unchecked="params"), TREE)
    for odd in ({"more": torch.zeros(1)}, {"params": torch.zeros(1)}, {"paramsx": {"y": torch.zeros(1)}}):
        with pytest.raises(WireError) as raised:
            unpack(pack(TREE | odd), spec, unchecked="params")
        assert raised.value.kind == "wrong keys"


def test_the_size_of_a_message_is_bounded() -> None:
    with pytest.raises(WireError) as raised:
        unpack(pack(TREE), max_bytes=100)
    assert raised.value.kind == "absurd size"


def test_unsupported_dtypes_raise_errors_before_sending() -> None:
    with pytest.raises(Exception, match="cannot be sent"):
        pack({"z": torch.zeros(2, dtype=torch.complex64)})


def test_any_bytes_give_a_tree_or_the_one_error() -> None:
    """Random damage to real messages; only a `WireError` may be raised, and accepted trees are complete."""
    rng = np.random.default_rng(0)
    whole, spec = pack(TREE), spec_of(TREE)
    names, letters = [*DTYPES, "object", "<f4", "", "complex64", "float128", "void"], "params/bw 0123,\n\0é"
    accepted = 0
    for turn in range(INPUTS):
        message = dict(whole)
        for _ in range(rng.integers(1, 4)):
            manifests = list(message) or list(whole)
            manifest = manifests[rng.integers(len(manifests))]
            one = message.get(manifest, FLOATS)
            match rng.integers(8):
                case 0:
                    data = bytearray(one.data or b"x")
                    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
                    message[manifest] = replace(one, data=bytes(data))
                case 1:
                    message[manifest] = replace(one, data=one.data[: rng.integers(len(one.data) + 1)])
                case 2:
                    message[manifest] = replace(one, data=rng.bytes(rng.integers(300)))
                case 3:
                    shape = tuple(int(n) for n in rng.integers(-2, 2 ** rng.integers(2, 60), rng.integers(5)))
                    message[manifest] = replace(one, shape=shape)
                case 4:
                    message[manifest] = replace(one, dtype=names[rng.integers(len(names))])
                case 5:
                    message.pop(manifest, None)
                case 6:  # a letter more, fewer or another
                    at, letter = rng.integers(len(manifest) + 1), letters[rng.integers(len(letters))]
                    message.pop(manifest, None)
                    message[manifest[:at] + letter * rng.integers(2) + manifest[at + rng.integers(2) :]] = one
                case 7:  # lines lost, doubled, swapped
                    lines = manifest.split("\n")
                    message.pop(manifest, None)
                    message["\n".join(rng.choice(lines, rng.integers(1, len(lines) + 2)))] = one
        try:
            tree = unpack(message, spec if turn % 2 else None, unchecked="params" if turn % 3 == 0 else None)
        except WireError:
            continue
        accepted += 1
        if turn % 6 in (1, 5):
            assert spec_of(tree) == spec
        assert sum(v.numel() for _, v in leaves(tree)) == sum(one.shape[0] for one in message.values())
    assert 0 < accepted < INPUTS  # flipped bits of the values themselves are nobody's business here
