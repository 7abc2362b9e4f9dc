"""Compression: exact where it can be, unbiased where it rounds, and as small as it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import size_in_bytes
from holdfast.updates.compression import Int4, Int8, parse_compression

VALUES = torch.from_numpy(np.random.default_rng(0).normal(size=3001).astype(np.float32))


def through(written: str, values: torch.Tensor = VALUES, round: int = 1) -> torch.Tensor:
    compression = parse_compression(written)
    return compression.decode(compression.encode(values, 0, round, 5), len(values), values.dtype)


@pytest.mark.parametrize(("written", "levels"), [("int8", 127), ("int4", 7), ("int4:bucket=10", 7)])
def test_values_are_rounded_to_a_neighbouring_level_of_their_bucket(written: str, levels: int) -> None:
    bucket = 10 if "bucket" in written else 1024
    got, values = through(written).double().numpy(), VALUES.double().numpy()
    for start in range(0, len(values), bucket):
        part = values[start : start + bucket]
        unit = np.abs(part).max() / levels
        multiples = got[start : start + bucket] / unit
        np.testing.assert_allclose(multiples, np.round(multiples), atol=1e-4)
        assert (np.abs(multiples - part / unit) < 1 + 1e-4).all()


def test_rounding_is_unbiased() -> None:
    values = torch.tensor([0.11, -0.37, 0.5, 1.0, 0.0], dtype=torch.float64)
    many = torch.stack([through("int4", values, round) for round in range(2000)])
    unit = 1 / 7
    assert (many.mean(0) - values).abs().max() < 4 * unit / 2 / np.sqrt(2000)
    assert many[:, 3].eq(1).all()
    assert many[:, 4].eq(0).all()
    fraction = 0.37 * 7 % 1  # the variance of rounding: p (1 - p) unit²
    assert float(many[:, 1].var()) == pytest.approx(fraction * (1 - fraction) * unit**2, rel=0.1)


def test_the_largest_values_arrive_and_no_others() -> None:
    got = through("topk:0.01")
    expected = np.zeros(3001, np.float32)
    largest = np.argsort(-np.abs(VALUES.numpy()))[:31]
    expected[largest] = VALUES.numpy()[largest]
    np.testing.assert_array_equal(got.numpy(), expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.sampled_from(["topk:0.5", "topk:0.05", "topk:1.0", "topk:0.3+int8", "topk:0.3+int4", "int4:bucket=7"]),
)
def test_what_arrives_is_near_the_largest_values(values: list[float], written: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    got = through(written, x)
    assert got.shape == x.shape
    step = {"int8": 127, "int4": 7}.get(written.partition("+")[2] or written.partition(":")[0])
    kept = got != 0
    assert ((got - x).abs()[kept] <= (float(x.abs().max()) / step * 1.001 if step else 0)).all()


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("int8", 3001 + 4 * 3),
        ("int4", 1501 + 4 * 3),
        ("topk:0.01", 31 * (4 + 4)),
        ("topk:0.2", 601 * 4 + 376),  # one bit for each value is shorter than 32 for each place
        ("topk:0.2+int4", 301 + 4 + 376),
    ],
)
def test_sizes(written: str, size: int) -> None:
    assert size_in_bytes(parse_compression(written).encode(VALUES, 0, 1, 5)) == size


def test_four_bits_are_packed_without_loss() -> None:
    levels = torch.arange(-7, 8, dtype=torch.int8)
    packed = Int4().pack(levels)
    assert packed.dtype == torch.uint8
    assert len(packed) == 8
    assert torch.equal(Int4().unpack(packed, 15), levels.to(torch.int16))
    assert Int8().pack(levels) is levels


@pytest.mark.parametrize("places", [[0, 1, 9], [0, 0, 1], [-1, 2, 3], [3, 2, 1]])
def test_forged_places_are_refused(places: list[int]) -> None:
    compression = parse_compression("topk:0.02")
    sent = compression.encode(torch.arange(150.0), 0, 1, 5)
    forged = [150 if place == 9 else place for place in places]
    with pytest.raises(HoldfastError, match="places of values must be 3 increasing numbers below 150"):
        compression.decode(sent | {"places": torch.tensor(forged, dtype=torch.int32)}, 150, torch.float32)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("int9", "unknown compression 'int9'"),
        ("int8+int4", "it must be topk, int8, int4"),
        ("int8+topk", "it must be topk, int8, int4"),
        ("topk:0", "topk: share is 0.0; it must be above 0"),
        ("int8:bucket=0", "int8: bucket is 0; it must be at least 1"),
    ],
)
def test_wrong_options_are_sentences(written: str, sentence: str) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        parse_compression(written)


@pytest.mark.parametrize("written", ["int8", "int4:bucket=9", "topk:0.2", "topk:0.2,feedback=false+int4"])
def test_descriptions_come_back(written: str) -> None:
    compression = parse_compression(written)
    assert parse_compression(compression.describe()) == compression
    assert parse_compression({"name": "topk", "share": 0.5}).topk.share == 0.5  # type: ignore[union-attr]
