"""Federations: the clients' samples as indices into one data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.spec import named, validate
from holdfast.data.dataset import Dataset
from holdfast.data.indexing import Ints, draw_per_class, offsets_of, ranges
from holdfast.data.partitions import Assignment, Partition, SamplePool, parse_partition
from holdfast.data.schedules import StageSchedule, describe_schedule, schedule_from
from holdfast.data.skew import FeatureSkew, LongTail

_FORMAT = "holdfast-federation-1"
_KEYS: dict[str, type | tuple[type, ...]] = {
    "hash": str,
    "dataset": str,
    "stages": int,
    "cumulative": bool,
    "schedule": (dict, NoneType),
    "partition": dict,
    "leaves": list,
    "public": list,
    "offsets": list,
    "indices": list,
}

_OF_VALIDATION = ("validation", "validation_offsets")
"""Lists that a file has where clients have validation data."""


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Federation:
    """The assignment of training samples to clients, and to stages if the data is a stream.

    Attributes:
        dataset: the data of all clients; sample ids are indices into its training part.
        indices: int64 ``[M]``, sample ids, ordered by client and, within a client, by stage.
        offsets: int64 ``[clients * stages + 1]``: stage s of client k is
            ``indices[offsets[k * stages + s]:offsets[k * stages + s + 1]]``.
        stages: the number of stages in which the data arrives (1: all at once).
        public: int64, the ids of samples that the server has and no client.
        partition: the parameters it was made with, as plain values: name, parameters, seed.
        schedule: the stage that each round trains; streams only.
        cumulative: whether a client keeps the data of earlier stages.
        leaves: int64 ``[clients]``, the stage from which a client no longer takes part; empty if no client leaves.
        validation: int64, the ids of samples on which clients test models instead of training, ordered by client.
        validation_offsets: int64 ``[clients + 1]``: those of client k are
            ``validation[validation_offsets[k]:validation_offsets[k + 1]]``; empty if no client has any.
    """

    dataset: Dataset
    indices: Ints
    offsets: Ints
    stages: int = 1
    public: Ints = field(default_factory=_none)
    partition: dict[str, Any] = field(default_factory=dict)
    schedule: StageSchedule | None = None
    cumulative: bool = False
    leaves: Ints = field(default_factory=_none)
    validation: Ints = field(default_factory=_none)
    validation_offsets: Ints = field(default_factory=_none)

    def __post_init__(self) -> None:
        for ids, owner in (
            (self.indices, "clients"),
            (self.public, "public data"),
            (self.validation, "validation data"),
        ):
            _need_in_range(ids, owner, len(self.dataset.y_train))
        parts = len(self.offsets) - 1
        if (
            parts < 1
            or self.stages < 1
            or parts % self.stages
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.indices)
        ):
            raise HoldfastError(
                f"offsets must begin with 0, end with {len(self.indices)} and have one entry more than "
                f"clients * stages (stages: {self.stages})"
            )
        if np.any(np.diff(self.offsets) < 0):
            raise HoldfastError("offsets must not decrease")
        if len(self.validation):
            self._check_validation()

    def _check_validation(self) -> None:
        ends = self.validation_offsets
        if len(ends) != self.clients + 1 or ends[0] != 0 or ends[-1] != len(self.validation):
            raise HoldfastError(
                f"validation_offsets must begin with 0, end with {len(self.validation)} and have {self.clients + 1} "
                "entries, one more than there are clients"
            )
        if np.any(np.diff(ends) < 0):
            raise HoldfastError("validation_offsets must not decrease")
        both = np.intersect1d(self.validation, self.indices)
        if len(both):
            raise HoldfastError(
                f"sample {both[0]} is in both the training and the validation data of a client; it can be in "
                "only one of them"
            )

    @property
    def clients(self) -> int:
        """The number of clients, including those without samples."""
        return (len(self.offsets) - 1) // self.stages

    def __repr__(self) -> str:
        parameters = ", ".join(f"{key}={value}" for key, value in self.partition.items() if key != "clients")
        stages = f" over {self.stages} stages" if self.stages > 1 else ""
        return f"Federation({self.dataset!r}, {self.clients} clients{stages}, {parameters})"

    def sizes(self, stage: int = 0) -> Ints:
        """The number of samples that each client trains on at a stage: int64 ``[clients]``."""
        first, last = self._spans(stage)
        return last - first

    def client(self, k: int, stage: int = 0) -> Ints:
        """The sample ids that client ``k`` trains on at a stage, including those of earlier stages if cumulative."""
        if not 0 <= k < self.clients:
            raise HoldfastError(f"there is no client {k}: the clients are 0 to {self.clients - 1}")
        first, last = self._spans(stage)
        return self.indices[first[k] : last[k]]

    def validation_sizes(self) -> Ints:
        """The number of validation samples of each client: int64 ``[clients]``."""
        return np.diff(self.validation_offsets) if len(self.validation) else np.zeros(self.clients, np.int64)

    def label_counts(self, clients: ArrayLike | None = None, stage: int | None = None) -> Ints:
        """Samples per client and class: int64 ``[len(clients), C]``; by default of all clients and all stages."""
        first, last = self._spans(stage)
        if clients is not None:
            chosen = np.asarray(clients, np.int64)
            first, last = first[chosen], last[chosen]
        sizes = last - first
        cells = np.repeat(np.arange(len(sizes)) * self.dataset.num_classes, sizes)
        cells += self._labels[self.indices[ranges(first, sizes)]]
        counts = np.bincount(cells, minlength=len(sizes) * self.dataset.num_classes)
        return counts.reshape(len(sizes), self.dataset.num_classes)

    @cached_property
    def class_counts(self) -> Ints:
        """Samples per class over all clients and stages: int64 ``[C]``."""
        return np.bincount(self._labels[self.indices], minlength=self.dataset.num_classes)

    def client_domains(self) -> tuple[tuple[str, ...], Ints]:
        """The names of the domains or sites, and the index of each client's most frequent one: int64 ``[clients]``.

        Both are empty if the data has no domains and no sites.
        """
        groups = self.dataset.groups
        group = groups.get("domain") or groups.get("site")
        if group is None:
            return (), _none()
        owner = np.repeat(np.arange(self.clients), np.diff(self.offsets[:: self.stages]))
        cells = owner * len(group.names) + group.train[self.indices]
        counts = np.bincount(cells, minlength=self.clients * len(group.names))
        return tuple(group.names), counts.reshape(self.clients, -1).argmax(1)

    @cached_property
    def hash(self) -> str:
        """64 hexadecimal digits; equal hashes mean the same samples, with the same skew, for every client.

        Samples are identified by id and label, not by content.
        """
        head: dict[str, Any] = {
            "classes": self.dataset.classes,
            "stages": self.stages,
            "cumulative": self.cumulative,
        }
        if "skew" in self.partition:
            head["skew"] = [self.partition["skew"], self.partition.get("seed")]
        digest = sha256(json.dumps(head).encode())
        validation = (self.validation, self.validation_offsets) if len(self.validation) else ()
        for array in (self._labels, self.indices, self.offsets, self.public, self.leaves, *validation):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, "<i8").data)
        return digest.hexdigest()

    @cached_property
    def _labels(self) -> Ints:
        return self.dataset.strata_train

    def _spans(self, stage: int | None) -> tuple[Ints, Ints]:
        """The start and end in ``indices`` of each client's data at a stage (None: all stages)."""
        first = self.offsets[:-1].reshape(-1, self.stages)
        last = self.offsets[1:].reshape(-1, self.stages)
        if stage is None:
            return first[:, 0], last[:, -1]
        if not 0 <= stage < self.stages:
            raise HoldfastError(f"there is no stage {stage}: the stages are 0 to {self.stages - 1}")
        if not self.cumulative:
            return first[:, stage], last[:, stage]
        if len(self.leaves):
            return first[:, 0], np.where(self.leaves > stage, last[:, stage], first[:, 0])
        return first[:, 0], last[:, stage]

    def holding_out(self, ids: ArrayLike) -> Federation:
        """The federation with these samples as validation data of the clients that hold them.

        Clients test models on these samples and do not train on them. Every client keeps at least one training and one
        validation sample.
        """
        chosen = _as_ids(ids, "validation data")
        _need_once(chosen, "validation data", len(self.dataset.y_train))
        held = np.isin(self.indices, chosen)
        if not np.isin(chosen, self.indices).all():
            stray = np.setdiff1d(chosen, self.indices)
            raise HoldfastError(
                f"sample {stray[0]} of the validation data is not among the training samples of any client"
            )
        return self.with_held_out(held)

    def with_held_out(self, held: NDArray[np.bool_]) -> Federation:
        """The federation with the entries of ``indices`` that the mask ``held`` [M] selects as validation data.

        Raises if a client would have training samples but no validation samples, or the other way round.
        """
        if len(self.validation):
            raise HoldfastError("the clients already have validation data; do not hold out more")
        cell = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        owner = cell // self.stages
        sizes, held_sizes = (np.bincount(of, minlength=self.clients) for of in (owner, owner[held]))
        for lacking, kind in ((held_sizes == 0, "validation"), (held_sizes == sizes, "training")):
            found = np.flatnonzero(lacking & (sizes > 0))
            if len(found):
                raise HoldfastError(
                    f"client {found[0]} would have no {kind} samples; of its {sizes[found[0]]} samples, "
                    f"{held_sizes[found[0]]} are validation data"
                )
        ids = self.indices[held]
        once = np.sort(np.unique(ids, return_index=True)[1])  # a stream may repeat samples
        return replace(
            self,
            indices=self.indices[~held],
            offsets=offsets_of(np.bincount(cell[~held], minlength=len(self.offsets) - 1)),
            validation=ids[once],
            validation_offsets=offsets_of(np.bincount(owner[held][once], minlength=self.clients)),
        )

    def save(self, path: str | Path) -> None:
        """Write the federation as JSON, with the name of the data set but without its samples."""
        content = {
            "format": _FORMAT,
            "hash": self.hash,
            "dataset": self.dataset.name,
            "clients": self.clients,
            "stages": self.stages,
            "cumulative": self.cumulative,
            "schedule": None if self.schedule is None else describe_schedule(self.schedule),
            "partition": self.partition,
            "leaves": self.leaves.tolist(),
            "public": self.public.tolist(),
            **({} if not len(self.validation) else self._validation_lists()),
            "offsets": self.offsets.tolist(),
            "indices": self.indices.tolist(),
        }
        # One key per line, so that the beginning of the file is readable and a diff shows what changed.
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        with files.writing(path := Path(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    def _validation_lists(self) -> dict[str, list[int]]:
        return {key: getattr(self, key).tolist() for key in _OF_VALIDATION}

    @classmethod
    def load(cls, path: str | Path, dataset: Dataset, *, schedule: StageSchedule | None = None) -> Federation:
        """Read a federation of ``dataset`` and check its hash; synthetic feature skew is applied again.

        ``schedule`` replaces the one in the file; it is required if the file's schedule is a user-defined class.
        """
        content = _read(path)
        keys = (
            "indices",
            "offsets",
            "public",
            "leaves",
            *(_OF_VALIDATION if "validation" in content else ()),
        )
        arrays = {key: _numbers(content, key, path) for key in keys}
        described = content["schedule"]
        federation = cls(
            dataset,
            **arrays,
            stages=content["stages"],
            partition=content["partition"],
            schedule=schedule or (None if described is None else schedule_from(described)),
            cumulative=content["cumulative"],
        )
        if federation.hash != content["hash"]:
            raise HoldfastError(
                f"'{path}' does not match the data: its hash differs, so either the file was changed or the data set "
                f"'{dataset.name}' is not the '{content['dataset']}' it was made from"
            )
        return with_skew(federation)


def _read(path: str | Path) -> dict[str, Any]:
    """The content of a federation file; an incomplete or damaged file raises an error."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HoldfastError(f"cannot read the federation '{path}': {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise HoldfastError(f"'{path}' is not a complete federation file ('format' must be '{_FORMAT}')")
    known = _KEYS | (dict.fromkeys(_OF_VALIDATION, list) if "validation" in content else {})
    for key, kind in known.items():
        if key not in content or not isinstance(content[key], kind):
            raise HoldfastError(f"'{path}' is not a complete federation file: '{key}' is missing or damaged")
    return content


def _numbers(content: Mapping[str, Any], key: str, path: str | Path) -> Ints:
    """A list of a federation file as an array."""
    for position, value in enumerate(content[key]):
        if not isinstance(value, int) or abs(value) >= 2**63:
            raise HoldfastError(f"'{path}' is damaged: {key}[{position}] is {value!r}, not a whole number")
    return np.array(content[key], np.int64)


def federate(
    dataset: Dataset,
    partition: Partition | str | Sequence[ArrayLike],
    *,
    clients: int | None = None,
    seed: int = 0,
    public: float | ArrayLike = 0.0,
    long_tail: LongTail | None = None,
    skew: FeatureSkew | None = None,
) -> Federation:
    """Assign the training samples of ``dataset`` to clients.

    Args:
        dataset: the data.
        partition: the rule, such as ``Dirichlet(0.1)`` or ``"dirichlet:0.1"``, or one sequence of sample ids per
            client.
        clients: the number of clients; optional for by-domain and by-writer partitions and for given ids.
        seed: the same seed gives the same federation.
        public: samples that the server has and no client: a fraction, drawn equally from every class, or sample ids.
        long_tail: reduces the classes first; a ``public`` fraction is drawn from the remaining samples.
        skew: transforms the images of each client in a different way.
    """
    check_given(dataset, clients, seed, long_tail, skew)
    if isinstance(partition, str):
        partition = parse_partition(partition)
    if not isinstance(partition, Partition | Sequence | np.ndarray):
        raise HoldfastError(
            f"partition is {named(partition)}; it must be a partition, such as holdfast.Dirichlet(0.1), text such "
            "as 'dirichlet:0.1', or a list with the sample ids of each client"
        )
    if isinstance(partition, Partition):
        ids, public_ids = split_public(dataset, seed, public, long_tail)
        pool = SamplePool.of(dataset.strata_train, dataset.groups, ids)
        count = partition.default_clients(pool) if clients is None else clients
        assignment = partition.assign(pool, count, generator(seed, "partition"))
        assignment = Assignment(ids[assignment.indices], assignment.offsets)
        description = partition.describe()
    else:
        if long_tail is not None:
            raise HoldfastError(
                "long_tail cannot be combined with given sample ids, because it would remove some of them"
            )
        assignment = _given_assignment(partition, clients, len(dataset.y_train))
        public_ids = _given_public(public, assignment.indices)
        description = {"name": "given"}
    description |= {"clients": len(assignment.offsets) - 1} | describe_setting(seed, public, long_tail, skew)
    return with_skew(Federation(dataset, assignment.indices, assignment.offsets, 1, public_ids, description))


def split_public(
    dataset: Dataset, seed: int, public: float | ArrayLike, long_tail: LongTail | None
) -> tuple[Ints, Ints]:
    """The ids of the samples for the clients, after the long tail, and of the server's public samples."""
    labels = dataset.strata_train
    given = np.ndim(public) > 0
    public_ids = _as_ids(public, "public data") if given else _none()
    _need_once(public_ids, "public data", len(labels))
    ids = np.delete(np.arange(len(labels)), public_ids)
    if long_tail is not None:
        ids = ids[long_tail.keep(labels[ids], dataset.num_classes, generator(seed, "long tail"))]
    if not given:
        fraction = float(np.asarray(public))
        if not 0 <= fraction < 1:
            raise HoldfastError(f"the public fraction must be at least 0 and below 1, not {fraction}")
        counts = np.bincount(labels[ids], minlength=dataset.num_classes)
        sizes = np.rint(fraction * counts).astype(np.int64)
        chosen = draw_per_class(labels[ids], sizes, generator(seed, "public data"))
        public_ids, ids = ids[chosen], np.delete(ids, chosen)
    return ids, np.sort(public_ids)


def check_given(dataset: object, clients: object, seed: object, long_tail: object, skew: object) -> None:
    """Raise an error for arguments of `federate` and `stream` that have a wrong type."""
    if not isinstance(dataset, Dataset):
        raise HoldfastError(
            f"dataset is {named(dataset)}; it must be a data set, such as holdfast.load('digits')"
        )
    validate("clients", clients, int | None)
    validate("seed", seed, int)
    for name, value, kind in (("long_tail", long_tail, LongTail), ("skew", skew, FeatureSkew)):
        if not (value is None or isinstance(value, kind)):
            raise HoldfastError(f"{name} is {named(value)}; it must be a holdfast.{kind.__name__}(...)")


def describe_setting(
    seed: int, public: float | ArrayLike, long_tail: LongTail | None, skew: FeatureSkew | None
) -> dict[str, Any]:
    """The entries of a description besides the partition: the seed, and each other argument that is used."""
    setting: dict[str, Any] = {"seed": seed}
    if np.ndim(public) > 0:
        setting["public"] = "given"
    elif public:
        setting["public"] = float(np.asarray(public))
    if long_tail is not None:
        setting["long_tail"] = long_tail.ratio
    if skew is not None:
        setting["skew"] = asdict(skew)
    return setting


def with_skew(federation: Federation) -> Federation:
    """The federation with the feature skew of its description applied to its images."""
    skew = federation.partition.get("skew")
    if skew is None:
        return federation
    owners = np.full(len(federation.dataset.y_train), -1, np.int64)
    spans = federation.offsets[:: federation.stages]
    owners[federation.indices] = np.repeat(np.arange(federation.clients), np.diff(spans))
    skewed = FeatureSkew(**skew).apply(
        federation.dataset, owners, federation.clients, federation.partition["seed"]
    )
    return replace(federation, dataset=skewed)


def _given_assignment(parts: Sequence[ArrayLike], clients: int | None, samples: int) -> Assignment:
    if not len(parts):
        raise HoldfastError("a federation needs the sample ids of at least 1 client")
    if clients not in (None, len(parts)):
        raise HoldfastError(f"sample ids of {len(parts)} clients are given, but clients is {clients}")
    lists = [_as_ids(part, f"client {k}") for k, part in enumerate(parts)]
    assignment = Assignment(np.concatenate(lists), offsets_of(np.array([len(ids) for ids in lists])))
    _need_once(assignment.indices, "clients", samples)
    return assignment


def _as_ids(values: ArrayLike, owner: str) -> Ints:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise HoldfastError(f"the sample ids of {owner} must be a flat list of whole numbers")
    return ids.astype(np.int64)


def _need_in_range(ids: Ints, owner: str, samples: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= samples):
        raise HoldfastError(
            f"sample ids of the {owner} must be between 0 and {samples - 1}, but range from {ids.min()} to "
            f"{ids.max()}"
        )


def _need_once(ids: Ints, owner: str, samples: int) -> None:
    _need_in_range(ids, owner, samples)
    times = np.bincount(ids, minlength=1)
    if times.max() > 1:
        raise HoldfastError(
            f"sample {int(times.argmax())} occurs {times.max()} times in the sample ids of the {owner}"
        )


def _given_public(public: float | ArrayLike, client_ids: Ints) -> Ints:
    """The server's sample ids, if the clients' sample ids are given as well."""
    if np.ndim(public) == 0:
        if public:
            raise HoldfastError("with given sample ids, public must be sample ids too, not a fraction")
        return _none()
    ids = np.sort(_as_ids(public, "public data"))
    both = np.intersect1d(ids, client_ids)
    if len(both):
        raise HoldfastError(
            f"sample {both[0]} is both public and assigned to a client; it can be only one of them"
        )
    return ids
