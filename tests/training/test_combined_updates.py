"""Everything that may be done to updates, together: what composes runs on all engines, the rest is refused."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from test_compressed_runs import train, weights

import holdfast as hf

OPTIONS: dict[str, Any] = {
    "dp": "epsilon=1e4,delta=1e-2,noise_multiplier=0.3",
    "dp_samples": "epsilon=1e4,delta=1e-2,noise_multiplier=0.3",
    "secure": "secagg+",
    "robust": "median",
    "compress": "topk:0.5+int8",
    "max_update_norm": 1.5,
    "max_update_ratio": 3.0,
}
TOGETHER = [
    ("dp", "dp_samples", "compress", "max_update_norm"),
    ("dp", "dp_samples", "secure"),
    ("dp_samples", "robust", "compress", "max_update_norm", "max_update_ratio"),
]
REFUSED = {
    ("dp", "robust"): "robust=median cannot be combined with dp",
    ("dp", "max_update_ratio"): "max_update_ratio cannot be combined with dp",
    ("secure", "robust"): "secure cannot be combined with robust",
    ("secure", "compress"): "secure cannot be combined with compress",
    ("secure", "max_update_norm"): "secure cannot be combined with max_update_norm",
    ("secure", "max_update_ratio"): "secure cannot be combined with max_update_ratio",
}


def test_every_pair_is_in_one_of_the_lists() -> None:
    composed = {pair for names in TOGETHER for pair in combinations(names, 2)}
    assert composed | {*REFUSED} == {*combinations(OPTIONS, 2)}
    assert not composed & {*REFUSED}


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_what_composes_runs_on_both_engines(names: tuple[str, ...]) -> None:
    pytest.importorskip("dp_accounting")
    how = {name: OPTIONS[name] for name in names} | {"rounds": 2, "clients_per_round": 5}
    one, other = (train(engine=engine, **how) for engine in ("sequential", "vectorized"))
    for a, b in zip(weights(one), weights(other), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    assert [r["bytes_up"] for r in one.records] == [r["bytes_up"] for r in other.records]


@pytest.mark.parametrize(("pair", "sentence"), REFUSED.items(), ids="+".join)
def test_what_does_not_compose_is_refused(pair: tuple[str, str], sentence: str) -> None:
    if "dp" in pair:
        pytest.importorskip("dp_accounting")
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(**{name: OPTIONS[name] for name in pair})
