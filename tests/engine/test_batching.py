"""Which samples a client visits in which step."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

from holdfast.core.random import generator
from holdfast.data.preprocess import Preprocess
from holdfast.engine.batching import BatchPlan, batch_sizes, plan_batches, widest_batch
from holdfast.engine.clients import Job, PlannedClient, held_out
from holdfast.engine.vectorized.round_schedule import schedule_round


def plan(
    samples: int,
    *,
    merge_single: bool = False,
    drop_last: bool = False,
    epochs: int = 3,
    round: int = 1,
    client: int = 0,
) -> BatchPlan:
    return plan_batches(
        seed=5,
        round=round,
        client=client,
        samples=samples,
        epochs=epochs,
        batch_size=4,
        merge_single=merge_single,
        preprocess=Preprocess(),
        shape=(2,),
        drop_last=drop_last,
    )


@pytest.mark.parametrize("merge_single", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 4, 5, 8, 9, 11])
def test_every_sample_once_an_epoch(samples: int, merge_single: bool) -> None:
    made = plan(samples, merge_single=merge_single)
    for epoch in range(3):
        visited = np.concatenate([r for r, e in zip(made.rows, made.epoch, strict=True) if e == epoch])
        assert sorted(visited) == list(range(samples))


def test_how_many_steps_there_are_is_known_without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests of private models need it, for all clients after every round."""
    drawn: list[str] = []

    def noting(seed: int, purpose: str, *counters: int) -> np.random.Generator:
        drawn.append(purpose)
        return generator(seed, purpose, *counters)

    monkeypatch.setattr("holdfast.engine.batching.generator", noting)
    made = plan(10)
    assert (made.steps, drawn) == (9, [])
    assert len(made.order) == 30
    assert len(made.order) == 30
    assert drawn == ["batches"] * 3  # once


def test_last_short_batch_is_kept() -> None:
    assert [len(rows) for rows in plan(10, epochs=1).rows] == [4, 4, 2]


@pytest.mark.parametrize(
    ("samples", "expected"), [(9, [4, 5]), (5, [5]), (10, [4, 4, 2]), (8, [4, 4]), (1, [1]), (3, [3])]
)
def test_with_batch_norm_a_single_last_sample_joins_the_batch_before(
    samples: int, expected: list[int]
) -> None:
    assert batch_sizes(samples, 4, merge_single=True) == expected


@pytest.mark.parametrize("merge_single", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [[1, 3], [2, 4], [5], [3, 8, 10], [4, 9], [1]])
def test_the_widest_batch_is_the_largest_there_is(
    samples: list[int], drop_last: bool, merge_single: bool
) -> None:
    largest = max(max(batch_sizes(n, 4, merge_single, drop_last)) for n in samples)
    assert widest_batch(np.array(samples), 4, merge_single, drop_last) == largest


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("width", [4, 5])
def test_a_step_is_half_as_wide_where_no_lane_has_more(width: int, narrow: bool) -> None:
    ids = [np.arange(samples) + 100 * samples for samples in (10, 7, 2)]
    planned = [
        PlannedClient(Job(k, own), own, own[:0], plan(len(own), epochs=1)) for k, own in enumerate(ids)
    ]
    layout = schedule_round(1, planned, 2, width, augments=False, allow_half_width=narrow)
    taken: dict[int, list[int]] = {}
    for slot in layout.slots:
        for step, size in zip(range(slot.first, slot.last + 1), slot.planned.plan.sizes, strict=True):
            assert size <= layout.widths[step]
            taken.setdefault(step, []).append(size)
            indices = layout.arrays["indices"][step, slot.lane, :size].tolist()
            assert set(indices) <= set(slot.planned.ids.tolist())
    for step, sizes in taken.items():
        half = -(-width // 2)
        assert layout.widths[step] == (half if narrow and max(sizes) <= half else width)
        assert layout.padded[step] == (min(sizes) < layout.widths[step])
    assert (layout.widths < width).any() == narrow


@pytest.mark.parametrize("merge_single", [False, True])
@pytest.mark.parametrize("samples", [4, 5, 8, 9, 11])
def test_dropped_last_batches_are_those_a_data_loader_drops(samples: int, merge_single: bool) -> None:
    made = plan(samples, merge_single=merge_single, drop_last=True)
    loader = DataLoader(range(samples), 4, drop_last=True)  # type: ignore[arg-type]
    assert made.sizes.tolist() == 3 * [len(batch) for batch in loader]
    assert made.ends_epoch.sum() == 3
    for epoch in range(3):
        visited = made.order[epoch * 4 * len(loader) : (epoch + 1) * 4 * len(loader)]
        assert len(set(visited)) == len(visited)
    assert set(made.order) <= set(range(samples))


def test_a_client_with_less_than_a_batch_keeps_it() -> None:
    assert plan(3, drop_last=True, epochs=1).sizes.tolist() == [3]


def test_dropping_changes_no_batch_before() -> None:
    kept, dropped = plan(10, epochs=1), plan(10, epochs=1, drop_last=True)
    assert kept.order[:8].tolist() == dropped.order.tolist()


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


@pytest.mark.parametrize("drop_last", [False, True])
def test_draws_of_augmentation_follow_the_samples(drop_last: bool) -> None:
    made = plan_batches(
        seed=5, round=1, client=0, samples=5, epochs=2, batch_size=2, merge_single=False,
        preprocess=Preprocess(crop=2, flip=True), shape=(1, 8, 8), drop_last=drop_last,
    )  # fmt: skip
    assert made.draws is not None
    assert [d.shape for d in made.draws] == [(len(rows), 5) for rows in made.rows]


def test_a_fifth_held_out_is_one_sample_at_least_and_never_the_only_one() -> None:
    samples = np.array([1, 2, 4, 9, 10, 14, 15])
    assert held_out(samples, 0.2).tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert held_out(samples, 0.0).tolist() == [0] * 7
