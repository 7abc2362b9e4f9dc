"""Which samples a client visits in which step."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.data.preprocess import Preprocess
from holdfast.engine.plan import Plan, batch_sizes, plan_client


def plan(
    samples: int, *, merge_single: bool = False, epochs: int = 3, round: int = 1, client: int = 0
) -> Plan:
    return plan_client(
        seed=5,
        round=round,
        client=client,
        samples=samples,
        epochs=epochs,
        batch_size=4,
        merge_single=merge_single,
        preprocess=Preprocess(),
        shape=(2,),
    )


@pytest.mark.parametrize("merge_single", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 4, 5, 8, 9, 11])
def test_every_sample_once_an_epoch(samples: int, merge_single: bool) -> None:
    made = plan(samples, merge_single=merge_single)
    for epoch in range(3):
        visited = np.concatenate([r for r, e in zip(made.rows, made.epoch, strict=True) if e == epoch])
        assert sorted(visited) == list(range(samples))


def test_last_short_batch_is_kept() -> None:
    assert [len(rows) for rows in plan(10, epochs=1).rows] == [4, 4, 2]


@pytest.mark.parametrize(
    ("samples", "expected"), [(9, [4, 5]), (5, [5]), (10, [4, 4, 2]), (8, [4, 4]), (1, [1]), (3, [3])]
)
def test_with_batch_norm_a_single_last_sample_joins_the_batch_before(
    samples: int, expected: list[int]
) -> None:
    assert batch_sizes(samples, 4, merge_single=True) == expected


def test_epochs_end_where_they_end() -> None:
    made = plan(10, epochs=2)
    assert np.flatnonzero(made.ends_epoch).tolist() == [2, 5]
    assert list(made.epoch) == [0, 0, 0, 1, 1, 1]


def test_order_depends_on_epoch_round_and_client_and_on_nothing_else() -> None:
    def order(**where: int) -> list[int]:
        return np.concatenate(plan(11, epochs=1, **where).rows).tolist()

    first = order(round=1, client=0)
    assert order(round=1, client=0) == first
    others = [
        order(round=2, client=0),
        order(round=1, client=1),
        np.concatenate(plan(11).rows)[11:22].tolist(),
    ]
    assert all(other != first for other in others)


def test_draws_of_augmentation_follow_the_samples() -> None:
    made = plan_client(
        seed=5, round=1, client=0, samples=5, epochs=2, batch_size=2, merge_single=False,
        preprocess=Preprocess(crop=2, flip=True), shape=(1, 8, 8),
    )  # fmt: skip
    assert made.draws is not None
    assert [d.shape for d in made.draws] == [(len(rows), 5) for rows in made.rows]
