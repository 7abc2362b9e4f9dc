"""Streams: every client has several tasks, which arrive in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.spec import named, validate
from holdfast.data.dataset import Dataset
from holdfast.data.federation import (
    Federation,
    check_given,
    describe_setting,
    federate,
    split_public,
    with_skew,
)
from holdfast.data.indexing import Ints, offsets_of, ranges, shuffled_by_class
from holdfast.data.partitions import Assignment, Partition, SamplePool, parse_partition, partition_from
from holdfast.data.removal import REMOVAL, remove_samples
from holdfast.data.schedules import GlobalEpochs, StageSchedule, given_schedule
from holdfast.data.skew import FeatureSkew, LongTail


def stream(
    dataset: Dataset,
    partition: Partition | str,
    *,
    clients: int | None = None,
    tasks_per_client: int = 5,
    chunks: bool = False,
    stage_classes: Sequence[Sequence[int]] | None = None,
    joins: ArrayLike | None = None,
    leaves: ArrayLike | None = None,
    cumulative: bool = False,
    schedule: StageSchedule | str | None = None,
    seed: int = 0,
    public: float | ArrayLike = 0.0,
    long_tail: LongTail | None = None,
    skew: FeatureSkew | None = None,
) -> Federation:
    """A federation whose clients get their data in stages, one task per client and stage.

    The samples are assigned to ``clients * tasks_per_client`` tasks as if each were a client; task j is stage
    ``j % tasks_per_client`` of client ``j // tasks_per_client``.
    ::

                   stage 0      stage 1      stage 2
        client 0   ## .. ..     .. #. #.     ## .. ..
        client 1   .. ## ..     #. .. #.     .. .. ##

    Args:
        dataset: the data.
        partition: assigns samples to tasks (to clients, with ``chunks``), as for `federate`.
        clients: the number of clients; required.
        tasks_per_client: the number of stages (T).
        chunks: assign samples to clients, then split each client's, ordered by class, into T equal chunks.
        stage_classes: the classes of each stage, T sequences. Each stage is then assigned to the clients separately;
            a class of several stages is divided equally among them, a class of no stage is left out.
        joins: the first stage of each client, ``[clients]``; it has no tasks before.
        leaves: the stage from which each client no longer takes part, ``[clients]``; ``tasks_per_client`` for never.
        cumulative: whether clients keep the data of earlier stages.
        schedule: the stage that each round trains, such as ``"every-n:10"``; `GlobalEpochs` by default.
        seed, public, long_tail, skew: as for `federate`.
    """
    if clients is None:
        raise HoldfastError("a stream needs the number of clients, such as clients=10")
    check_given(dataset, clients, seed, long_tail, skew)
    validate("tasks_per_client", tasks_per_client, int)
    if isinstance(partition, str):
        partition = parse_partition(partition)
    if not isinstance(partition, Partition):
        raise HoldfastError(
            f"partition is {named(partition)}; a stream takes a partition, such as holdfast.ClassShards(2), or text "
            "such as 'class-shards:2'"
        )
    present = _presence(clients, tasks_per_client, joins, leaves)
    if chunks and stage_classes is not None:
        raise HoldfastError(
            "chunks cannot be combined with stage_classes: they follow the order of each client's own classes"
        )
    ids, public_ids = split_public(dataset, seed, public, long_tail)
    pool = SamplePool.of(dataset.strata_train, dataset.groups, ids)
    rng = generator(seed, "partition")
    if chunks:
        assignment = _by_chunks(pool, partition, present, rng)
    elif stage_classes is not None:
        has_class = _stage_class_table(stage_classes, tasks_per_client, dataset.num_classes)
        assignment = _by_stage(pool, partition, present, has_class, rng)
    else:
        assignment = _by_task(pool, partition, present, rng)
    description = partition.describe() | {
        "clients": clients,
        "stream": {
            "tasks_per_client": tasks_per_client,
            "chunks": chunks,
            "cumulative": cumulative,
            "stage_classes": None if stage_classes is None else [list(map(int, c)) for c in stage_classes],
            "joins": None if joins is None else np.asarray(joins).tolist(),
            "leaves": None if leaves is None else np.asarray(leaves).tolist(),
        },
    }
    return with_skew(
        Federation(
            dataset,
            ids[assignment.indices],
            assignment.offsets,
            tasks_per_client,
            public_ids,
            description | describe_setting(seed, public, long_tail, skew),
            given_schedule(schedule, tasks_per_client) or GlobalEpochs(tasks_per_client),
            cumulative,
            np.empty(0, np.int64) if leaves is None else np.asarray(leaves, np.int64),
        )
    )


def federation_from(
    dataset: Dataset, description: Mapping[str, Any], schedule: StageSchedule | None = None
) -> Federation:
    """The federation with this description (`Federation.partition`), made again from the same data set."""
    values = dict(description)
    if "given" in (values.get("name"), values.get("public")):
        raise HoldfastError("this federation was made from given sample ids: load it from its own file")
    streaming = values.pop("stream", None)
    setting: dict[str, Any] = {key: values.pop(key) for key in ("clients", "seed", "public") if key in values}
    if "long_tail" in values:
        setting["long_tail"] = LongTail(values.pop("long_tail"))
    if "skew" in values:
        setting["skew"] = FeatureSkew(**values.pop("skew"))
    partition = partition_from(values)
    if streaming is None:
        return federate(dataset, partition, **setting)
    if streaming.get("name") == REMOVAL:
        options = {key: value for key, value in streaming.items() if key != "name"}
        return remove_samples(federate(dataset, partition, **setting), schedule=schedule, **options)
    return stream(dataset, partition, schedule=schedule, **streaming, **setting)


def _presence(
    clients: int, stages: int, joins: ArrayLike | None, leaves: ArrayLike | None
) -> NDArray[np.bool_]:
    """Whether each client has a task at each stage: bool ``[clients, stages]``."""
    if clients < 1 or stages < 1:
        raise HoldfastError(f"a stream needs at least 1 client and 1 task, not {clients} and {stages}")
    start = np.zeros(clients, np.int64) if joins is None else np.asarray(joins)
    end = np.full(clients, stages) if leaves is None else np.asarray(leaves)
    for name, values in (("joins", start), ("leaves", end)):
        valid = values.shape == (clients,) and values.dtype.kind in "iu"
        if not valid or values.min() < 0 or values.max() > stages:
            raise HoldfastError(f"'{name}' must hold one stage for each of {clients} clients, 0 to {stages}")
    if np.any(start >= end):
        raise HoldfastError(f"client {int(np.argmax(start >= end))} leaves before it has joined")
    stage = np.arange(stages)
    return (start[:, None] <= stage) & (stage < end[:, None])


def _by_task(
    pool: SamplePool, partition: Partition, present: NDArray[np.bool_], rng: np.random.Generator
) -> Assignment:
    tasks = int(present.sum())
    try:
        assignment = partition.assign(pool, tasks, rng)
    except HoldfastError as error:
        raise HoldfastError(f"in a stream each of the {tasks} tasks counts as a client: {error}") from None
    sizes = np.zeros(present.size, np.int64)
    sizes[present.ravel()] = np.diff(assignment.offsets)
    return Assignment(assignment.indices, offsets_of(sizes))


def _by_chunks(
    pool: SamplePool, partition: Partition, present: NDArray[np.bool_], rng: np.random.Generator
) -> Assignment:
    clients = len(present)
    assignment = partition.assign(pool, clients, rng)
    samples, tasks = np.diff(assignment.offsets), present.sum(1)
    short = np.flatnonzero((samples > 0) & (samples < tasks))
    if len(short):
        raise HoldfastError(
            f"client {short[0]} has {samples[short[0]]} samples, too few for {tasks[short[0]]} tasks; use fewer "
            "tasks per client or a larger min_size"
        )
    owner = np.repeat(np.arange(clients), samples)
    indices = assignment.indices[np.lexsort((pool.labels[assignment.indices], owner))]
    # The first (samples mod tasks) tasks of a client get one sample more than its others.
    nth = np.cumsum(present, axis=1) - 1
    sizes = samples[:, None] // tasks[:, None] + (nth < (samples % tasks)[:, None])
    return Assignment(indices, offsets_of((sizes * present).ravel()))


def _by_stage(
    pool: SamplePool,
    partition: Partition,
    present: NDArray[np.bool_],
    has_class: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Assignment:
    stage_of = _stages_of_samples(pool.labels, has_class, rng)
    sizes = np.zeros(present.shape, np.int64)
    ids = []
    for stage, clients in enumerate(present.T):
        members = np.flatnonzero(stage_of == stage)
        if not clients.any() or not len(members):
            continue
        try:
            assignment = partition.assign(pool.subset(members), int(clients.sum()), rng)
        except HoldfastError as error:
            raise HoldfastError(f"stage {stage} of the stream: {error}") from None
        sizes[clients, stage] = np.diff(assignment.offsets)
        ids.append(members[assignment.indices])
    if not ids:
        raise HoldfastError("no client has any data at any stage of this stream")
    # Reorder the samples, which are ordered by stage, by client.
    starts = offsets_of(sizes.T.ravel())[:-1].reshape(sizes.T.shape).T
    return Assignment(np.concatenate(ids)[ranges(starts.ravel(), sizes.ravel())], offsets_of(sizes.ravel()))


def _stage_class_table(
    stage_classes: Sequence[Sequence[int]], stages: int, classes: int
) -> NDArray[np.bool_]:
    """Whether each stage has each class: bool ``[stages, C]``."""
    if not _is_nested(stage_classes):
        raise HoldfastError(
            f"stage_classes must look like [[0, 1], [2]], a list for each stage, not {stage_classes!r}"
        )
    if len(stage_classes) != stages:
        raise HoldfastError(
            f"stage_classes must name the classes of {stages} stages, not {len(stage_classes)}"
        )
    table = np.zeros((stages, classes), np.bool_)
    for stage, names in enumerate(stage_classes):
        if any(not 0 <= c < classes for c in names):
            raise HoldfastError(f"stage {stage} names a class outside 0 to {classes - 1}: {list(names)}")
        table[stage, list(names)] = True
    return table


def _is_nested(lists: object) -> bool:
    """Whether this is a sequence of sequences of whole numbers."""
    return isinstance(lists, Sequence) and all(
        isinstance(inner, Sequence) and all(isinstance(c, (int, np.integer)) for c in inner)
        for inner in lists
    )


def _stages_of_samples(labels: Ints, has_class: NDArray[np.bool_], rng: np.random.Generator) -> Ints:
    """The stage of each sample, -1 for none; a class is divided equally among its stages."""
    order = shuffled_by_class(labels, rng)
    label = labels[order]
    stages = has_class.sum(0)
    nth = ranges(np.zeros(len(stages), np.int64), np.bincount(labels, minlength=len(stages)))
    # Column c of the table begins with the stages that have class c, which its samples get in turn.
    table = np.argsort(~has_class, axis=0, kind="stable")
    stage_of = np.empty(len(labels), np.int64)
    stage_of[order] = np.where(stages[label] > 0, table[nth % np.maximum(stages[label], 1), label], -1)
    return stage_of
