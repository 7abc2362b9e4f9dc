"""Data that changes over time: every client has several tasks, which arrive in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.spec import named, validate
from holdfast.data.dataset import Dataset
from holdfast.data.dealing import Ints, offsets_of, ranges, shuffled_by_class
from holdfast.data.federation import (
    Federation,
    check_given,
    describe_setting,
    federate,
    share_with_server,
    with_skew,
)
from holdfast.data.partitions import Assignment, Partition, SamplePool, parse_partition, partition_from
from holdfast.data.schedules import GlobalEpochs, StageSchedule
from holdfast.data.skew import FeatureSkew, LongTail


def stream(
    dataset: Dataset,
    partition: Partition | str,
    *,
    clients: int,
    tasks_per_client: int = 5,
    chunks: bool = False,
    stage_classes: Sequence[Sequence[int]] | None = None,
    joins: ArrayLike | None = None,
    leaves: ArrayLike | None = None,
    cumulative: bool = False,
    schedule: StageSchedule | None = None,
    seed: int = 0,
    public: float | ArrayLike = 0.0,
    long_tail: LongTail | None = None,
    skew: FeatureSkew | None = None,
) -> Federation:
    """A federation whose clients get their data in stages, one task per client and stage.

    The samples are dealt to ``clients * tasks_per_client`` tasks as if each were a client, and task j goes to
    client ``j // tasks_per_client`` as its stage ``j % tasks_per_client``.
    ::

                   stage 0      stage 1      stage 2
        client 0   ## .. ..     .. #. #.     ## .. ..
        client 1   .. ## ..     #. .. #.     .. .. ##

    Args:
        dataset: the data.
        partition: how samples are dealt to tasks (to clients, with ``chunks``), as for `federate`.
        clients: how many.
        tasks_per_client: how many stages there are (T).
        chunks: deal samples to clients, then cut each client's, ordered by class, into T equal chunks.
        stage_classes: the classes of each stage, T sequences. Each stage is then dealt to the clients by
            itself; a class of several stages is shared equally by them, a class of none is left out.
        joins: the first stage of each client, ``[clients]``; there is no task for it before.
        leaves: the stage at which each client is gone, ``[clients]``; ``tasks_per_client`` for never.
        cumulative: whether clients keep the data of earlier stages.
        schedule: which round trains which stage; `GlobalEpochs` by default.
        seed, public, long_tail, skew: as for `federate`.
    """
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
            "chunks follow each client's own classes; stage_classes cannot be given with them"
        )
    ids, public_ids = share_with_server(dataset, seed, public, long_tail)
    pool = SamplePool.of(dataset.y_train.numpy(), dataset.groups, ids)
    rng = generator(seed, "partition")
    if chunks:
        dealt = _by_chunks(pool, partition, present, rng)
    elif stage_classes is not None:
        declared = _declared(stage_classes, tasks_per_client, dataset.num_classes)
        dealt = _by_stage(pool, partition, present, declared, rng)
    else:
        dealt = _by_task(pool, partition, present, rng)
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
            ids[dealt.indices],
            dealt.offsets,
            tasks_per_client,
            public_ids,
            description | describe_setting(seed, public, long_tail, skew),
            schedule or GlobalEpochs(tasks_per_client),
            cumulative,
            np.empty(0, np.int64) if leaves is None else np.asarray(leaves, np.int64),
        )
    )


def federation_from(
    dataset: Dataset, description: Mapping[str, Any], schedule: StageSchedule | None = None
) -> Federation:
    """Make a federation again from its description (`Federation.partition`) and the same data set."""
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
    return stream(dataset, partition, schedule=schedule, **streaming, **setting)


def _presence(
    clients: int, stages: int, joins: ArrayLike | None, leaves: ArrayLike | None
) -> NDArray[np.bool_]:
    """Who has a task when: bool ``[clients, stages]``."""
    if clients < 1 or stages < 1:
        raise HoldfastError(f"a stream needs at least 1 client and 1 task, not {clients} and {stages}")
    first = np.zeros(clients, np.int64) if joins is None else np.asarray(joins)
    gone = np.full(clients, stages) if leaves is None else np.asarray(leaves)
    for what, when in (("joins", first), ("leaves", gone)):
        right = when.shape == (clients,) and when.dtype.kind in "iu"
        if not right or when.min() < 0 or when.max() > stages:
            raise HoldfastError(f"'{what}' must hold one stage for each of {clients} clients, 0 to {stages}")
    if np.any(first >= gone):
        raise HoldfastError(f"client {int(np.argmax(first >= gone))} leaves before it has joined")
    stage = np.arange(stages)
    return (first[:, None] <= stage) & (stage < gone[:, None])


def _by_task(
    pool: SamplePool, partition: Partition, present: NDArray[np.bool_], rng: np.random.Generator
) -> Assignment:
    tasks = int(present.sum())
    try:
        dealt = partition.assign(pool, tasks, rng)
    except HoldfastError as error:
        raise HoldfastError(f"in a stream each of the {tasks} tasks counts as a client: {error}") from None
    sizes = np.zeros(present.size, np.int64)
    sizes[present.ravel()] = np.diff(dealt.offsets)
    return Assignment(dealt.indices, offsets_of(sizes))


def _by_chunks(
    pool: SamplePool, partition: Partition, present: NDArray[np.bool_], rng: np.random.Generator
) -> Assignment:
    clients = len(present)
    dealt = partition.assign(pool, clients, rng)
    held, tasks = np.diff(dealt.offsets), present.sum(1)
    short = np.flatnonzero((held > 0) & (held < tasks))
    if len(short):
        raise HoldfastError(
            f"client {short[0]} holds {held[short[0]]} samples, too few for {tasks[short[0]]} tasks; take "
            f"fewer tasks per client or a larger min_size"
        )
    owner = np.repeat(np.arange(clients), held)
    indices = dealt.indices[np.lexsort((pool.labels[dealt.indices], owner))]
    # A client's n-th task, from 0, gets one sample more if it is among the first (samples mod tasks).
    nth = np.cumsum(present, axis=1) - 1
    sizes = held[:, None] // tasks[:, None] + (nth < (held % tasks)[:, None])
    return Assignment(indices, offsets_of((sizes * present).ravel()))


def _by_stage(
    pool: SamplePool,
    partition: Partition,
    present: NDArray[np.bool_],
    declared: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Assignment:
    stage_of = _stages_of_samples(pool.labels, declared, rng)
    sizes = np.zeros(present.shape, np.int64)
    ids = []
    for stage, there in enumerate(present.T):
        members = np.flatnonzero(stage_of == stage)
        if not there.any() or not len(members):
            continue
        try:
            dealt = partition.assign(pool.subset(members), int(there.sum()), rng)
        except HoldfastError as error:
            raise HoldfastError(f"stage {stage} of the stream: {error}") from None
        sizes[there, stage] = np.diff(dealt.offsets)
        ids.append(members[dealt.indices])
    if not ids:
        raise HoldfastError("no client has any data at any stage of this stream")
    # So far the samples lie stage by stage; a federation has them client by client.
    starts = offsets_of(sizes.T.ravel())[:-1].reshape(sizes.T.shape).T
    return Assignment(np.concatenate(ids)[ranges(starts.ravel(), sizes.ravel())], offsets_of(sizes.ravel()))


def _declared(stage_classes: Sequence[Sequence[int]], stages: int, classes: int) -> NDArray[np.bool_]:
    """Which classes each stage has: bool ``[stages, C]``."""
    if not _is_nested(stage_classes):
        raise HoldfastError(
            f"stage_classes must look like [[0, 1], [2]], a list for each stage, not {stage_classes!r}"
        )
    if len(stage_classes) != stages:
        raise HoldfastError(
            f"stage_classes must name the classes of {stages} stages, not {len(stage_classes)}"
        )
    declared = np.zeros((stages, classes), np.bool_)
    for stage, names in enumerate(stage_classes):
        if any(not 0 <= c < classes for c in names):
            raise HoldfastError(f"stage {stage} names a class outside 0 to {classes - 1}: {list(names)}")
        declared[stage, list(names)] = True
    return declared


def _is_nested(lists: object) -> bool:
    """Whether this is a sequence of sequences of whole numbers."""
    return isinstance(lists, Sequence) and all(
        isinstance(inner, Sequence) and all(isinstance(c, (int, np.integer)) for c in inner)
        for inner in lists
    )


def _stages_of_samples(labels: Ints, declared: NDArray[np.bool_], rng: np.random.Generator) -> Ints:
    """The stage each sample belongs to, -1 for none; a class is shared equally by its stages."""
    order = shuffled_by_class(labels, rng)
    label = labels[order]
    stages = declared.sum(0)
    nth = ranges(np.zeros(len(stages), np.int64), np.bincount(labels, minlength=len(stages)))
    # Column c of the table begins with the stages that have class c; its samples take them in turn.
    table = np.argsort(~declared, axis=0, kind="stable")
    stage_of = np.empty(len(labels), np.int64)
    stage_of[order] = np.where(stages[label] > 0, table[nth % np.maximum(stages[label], 1), label], -1)
    return stage_of
