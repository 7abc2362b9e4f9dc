"""`check_method`: whether a method gives the same results on every engine, in every order, and after a kill."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.spec import named
from holdfast.core.trees import leaves
from holdfast.data.dataset import Dataset, Group
from holdfast.data.federation import Federation, federate
from holdfast.engine.base import NO_OVERLAP, Engine, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Job
from holdfast.engine.factory import vmap_error
from holdfast.engine.method_trial import difference, generators_kept
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Method
from holdfast.methods.context import RunContext
from holdfast.methods.contracts import NARROW
from holdfast.methods.guard import watching_draws
from holdfast.methods.masking import respects_mask
from holdfast.methods.registry import parse_method
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec, as_model
from holdfast.training.checks import check_method_kind, misspelt_hooks
from holdfast.training.session import Training
from holdfast.training.train import train

SIZES = (7, 4, 2, 10, 5)
"""Samples of the clients: in batches of 3, last batches of one and two samples, and none."""

BATCH_SIZE, ROUNDS, CLIENTS_PER_ROUND = 3, 3, 4
SCHEDULE: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients_per_round": CLIENTS_PER_ROUND,
    "local_epochs": 2,
    "batch_size": BATCH_SIZE,
    "lr": 0.05,
    "seed": 1,
}
PUBLIC, TESTED, MAX_CLASSES = 8, 64, 12

TOLERANCE = {"float64": 1e-4, "float32": 1e-2}
"""Relative to a tensor's largest entry; adaptive steps may amplify rounding where a gradient is close to zero."""

Results = list[dict[str, Tensor]]
"""After each round, the global model, the server's state and the clients' states, by path."""

FUNCTIONS = "hooks within a step must be functions of their arguments"


@dataclass(frozen=True)
class MethodCheck:
    """The result of `check_method`: the checks that the method passed, and a sentence for each problem.

    Its truth value is true if there is no problem.
    """

    method: str
    passed: tuple[str, ...]
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"  passed: {text}" for text in self.passed] + [
            f"  failed: {text}" for text in self.problems
        ]
        return "\n".join([f"{self.method}: {'correct' if self else 'not correct'}", *lines])


def check_method(
    method: Method | str,
    model: ModelSpec | OwnModel | nn.Module | Callable[..., nn.Module] | str | None = None,
    federation: Federation | Dataset | None = None,
    *,
    raise_error: bool = True,
) -> MethodCheck:
    """Check that a method gives the same results on every engine and in every order; takes seconds on the CPU.

    The method is trained for three rounds on five clients of 2 to 10 samples, in batches of three, of which some are
    incomplete; every client lacks a class. These runs must agree:

    - two runs of engine ``sequential``, to the bit;
    - one that trains the clients of a round in the opposite order;
    - one of engine ``vectorized``, which trains them in parallel;
    - one that stops after the first round and is resumed from its checkpoint, to the bit.

    In addition, the method must train on last batches of one sample, every upload must be usable, states must not grow
    from round to round, integer counters must not overflow, and no name may be a misspelt hook. The runs use float64,
    or float32 if the method does not train in float64.

    Args:
        method: a method, or text such as ``"mine.py:Mine"``.
        model: as for `holdfast.train`; by default a small network with BatchNorm.
        federation: the data, of which a few samples are used; by default small images of four classes. The clients
            are always those described above.
        raise_error: raise the first problem as a `HoldfastError`; otherwise it is among ``problems``.
    """
    check_method_kind(method)
    method = parse_method(method) if isinstance(method, str) else method
    dataset, public = _data(federation)
    with warnings.catch_warnings(), generators_kept([]):
        warnings.simplefilter("ignore")
        chosen = _network(dataset) if model is None else as_model(model)
        checks = _Checks(method, chosen, _small_federation(dataset, public), is_default=model is None)
        checks.run()
    found = MethodCheck(method.name, tuple(checks.passed), tuple(checks.problems))
    if found.problems and raise_error:
        more = len(found.problems) - 1
        rest = f" (and {more} more; raise_error=False lists them)" if more else ""
        raise HoldfastError(found.problems[0] + rest)
    return found


class _Checks:
    def __init__(
        self,
        method: Method,
        model: ModelSpec | OwnModel | nn.Module,
        federation: Federation,
        is_default: bool = False,
    ) -> None:
        self.method, self.model, self.federation, self.precision = method, model, federation, "float64"
        self.is_default = is_default
        self.passed: list[str] = []
        self.problems: list[str] = []

    def run(self) -> None:
        """Run all checks; stop if the reference run fails."""
        self._report("defines no name that is almost a hook's", misspelt_hooks(self.method))
        reference = self._reference()
        if reference is None:
            return
        self._report(
            "states keep their size and cannot overflow", [*_growing(reference), *_narrow(reference)]
        )
        if self.is_default:
            self._check_single_samples()
        self._compare(
            "two runs give the same bits",
            reference,
            self._sequential,
            "when it is trained again: it keeps values outside of its carry and states, or depends on something that "
            "changes",
            exact=True,
        )
        self._compare(
            "the order of the clients has no influence",
            reference,
            self._reversed,
            "when the clients of a round are trained in another order: it keeps values from one client to the next, "
            "or depends on the order of the uploads",
        )
        self._compare_vectorized(reference)
        self._compare_resumed()

    def _reference(self) -> Results | None:
        with watching_draws() as draws:
            found = self._results_or_error(self._sequential)
            if isinstance(found, str):
                self.precision, in_float64 = "float32", found
                found = self._results_or_error(self._sequential)
                found = in_float64 if isinstance(found, str) else found
        if isinstance(found, str):
            self.problems.append(found)
            return None
        self.passed.append("trains on clients of unequal sizes that lack classes")
        drawn = f"{self.method.name}: {draws[0]} draws from a global random generator" if draws else ""
        advice = "; draw with client.generator(...) or context.generator(...)"
        self._report("draws from no global random generator", [drawn + advice] if drawn else [])
        return found

    def _check_single_samples(self) -> None:
        """Train without BatchNorm, for which a last batch of one sample is merged with the one before."""
        plain = _Checks(self.method, _network(self.federation.dataset, batchnorm=False), self.federation)
        plain.precision = self.precision
        found = plain._results_or_error(plain._sequential)
        failed = (
            f"training fails where a last batch has one sample, which has no deviation or covariance: {found}"
        )
        self._report("trains on last batches of one sample", [failed] if isinstance(found, str) else [])

    def _compare_vectorized(self, reference: Results) -> None:
        training = self._training("sequential")
        obstacle = vmap_error(training.context, training.data, BATCH_SIZE, len(SIZES))
        if obstacle is not None:
            self.passed.append(f"the model trains on engine sequential only ({obstacle})")
            return
        mask = " and leave out what batch.mask marks as padding" if respects_mask(self.method) else ""
        self._compare(
            "engines sequential and vectorized agree",
            reference,
            lambda: self._results("vectorized"),
            f"on engine vectorized, which trains clients in parallel: {FUNCTIONS}{mask}",
        )

    def _compare_resumed(self) -> None:
        what = "a resumed run gives the same bits"
        try:
            problem = self._difference_of_resumed()
        except Exception as error:
            problem = f"{self.method.name}: a run cannot be stopped and resumed: {_sentence(error)}"
        self._report(what, [problem] if problem else [])

    def _difference_of_resumed(self) -> str | None:
        whole = self._train()
        with TemporaryDirectory() as folder:
            self._train(out=Path(folder), stop_after=1)
            resumed = self._train(out=Path(folder), resume=True)
        apart = difference(whole.model.state_dict(), resumed.model.state_dict(), 0.0)
        if apart is None:
            return None
        return (
            f"{self.method.name} gives another model when a run is stopped after round 1 and resumed: {apart}; what a "
            "round leaves for the next one must be in the states of the server and of the clients"
        )

    def _compare(
        self, what: str, reference: Results, train: Callable[[], Results], why: str, exact: bool = False
    ) -> None:
        found = self._results_or_error(train)
        if isinstance(found, str):
            self.problems.append(found)
            return
        tolerance = 0.0 if exact else TOLERANCE[self.precision]
        rounds = zip(reference, found, strict=True)
        apart = ((n, difference(one, other, tolerance)) for n, (one, other) in enumerate(rounds, 1))
        first = next(((n, text) for n, text in apart if text is not None), None)
        problem = [] if first is None else [
            f"{self.method.name} gives other results {why}; after round {first[0]}, {first[1]}"
        ]  # fmt: skip
        self._report(what, problem)

    def _report(self, what: str, problems: Sequence[str]) -> None:
        """Record a check as passed, or its problems."""
        self.problems += [
            p if p.startswith(self.method.name) else f"{self.method.name}: {p}" for p in problems
        ]
        if not problems:
            self.passed.append(what)

    def _results_or_error(self, train: Callable[[], Results]) -> Results | str:
        try:
            return train()
        except Exception as error:
            sentence = _sentence(error)
            return sentence if self.method.name in sentence else f"{self.method.name}: {sentence}"

    def _sequential(self) -> Results:
        return self._results("sequential")

    def _reversed(self) -> Results:
        settings = Settings(**SCHEDULE)
        return self._results(lambda method, context, data: _Reversed(method, context, data, settings))

    def _results(self, engine: str | Callable[[Method, RunContext, DeviceData], Engine]) -> Results:
        """Train all rounds on an engine with a fresh copy of the method."""
        client_states = StateCache(None, None)
        loop = self._training(engine).loop(client_states)
        found = []
        for number in range(1, ROUNDS + 1):
            for incident in loop.round(number)["incidents"]:
                detail = f", {incident['detail']}" if incident.get("detail") else ""
                raise HoldfastError(
                    f"{self.method.name}: the upload of client {incident['client']} in round {number} is left out: "
                    f"{incident['kind']}{detail}"
                )
            server = loop.server
            trees = {
                "the global weight": server.params,
                "the global buffer": server.buffers,
                "the server's state": server.state,
                **{f"client {k}'s state": client_states.get(k) or {} for k in range(len(SIZES))},
            }
            found.append({path: value.detach().clone() for path, value in leaves(trees)})
        return found

    def _training(self, engine: str | Callable[[Method, RunContext, DeviceData], Engine]) -> Training:
        return Training(
            copy.deepcopy(self.method),
            self.model,
            self.federation,
            Settings(**SCHEDULE),
            engine=engine,
            device="cpu",
            precision=self.precision,
            parallel_clients=2 if engine == "vectorized" else None,
        )

    def _train(self, **options: Any) -> Any:
        return train(
            copy.deepcopy(self.method), self.model, self.federation, **SCHEDULE, **options,
            engine="sequential", device="cpu", precision=self.precision, progress=False,
        )  # fmt: skip


class _Reversed(SequentialEngine):
    """Trains the clients of a round in the opposite order."""

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult]:
        return super().train(sent, jobs[::-1], overlap)


def _sentence(error: Exception) -> str:
    if isinstance(error, HoldfastError):
        return str(error)
    first = (str(error).strip() or "without a message").splitlines()[0]
    return f"{type(error).__name__}: {first.rstrip('.')}"


def _growing(results: Results) -> Iterator[str]:
    """A sentence on states that have more values after every round."""
    owners = {path.partition("/")[0] for found in results for path in found}
    for owner in sorted(owner for owner in owners if owner.endswith("state")):
        sizes = [
            sum(v.numel() for path, v in found.items() if path.partition("/")[0] == owner)
            for found in results
        ]
        if all(a and a < b for a, b in pairwise(sizes)):
            yield (
                f"{owner} grows in every round, to {', '.join(map(str, sizes))} values, and checkpoints and memory "
                "with it; keep a running value, or the last few"
            )
            return


def _narrow(results: Results) -> Iterator[str]:
    """A sentence on integers that change between rounds and whose type may overflow."""
    for before, after in pairwise(results):
        for path, value in after.items():
            integer = value.dtype in NARROW and not value.is_floating_point() and value.dtype != torch.bool
            if integer and path in before and not torch.equal(before[path], value):
                owner, _, name = path.replace("/method/", "/").partition("/")
                yield (
                    f"{owner} has '{name}' as {value.dtype}, which changes from round to round and overflows; use "
                    "int64, float32 or float64"
                )
                return


# Data -----------------------------------------------------------------------------------------------------


def _data(given: Federation | Dataset | None) -> tuple[Dataset, np.ndarray]:
    """The data set, and the ids of its public samples, if it has any."""
    none = np.zeros(0, np.int64)
    if given is None:
        return _images(), none
    if isinstance(given, Federation):
        return given.dataset, given.public
    if isinstance(given, Dataset):
        return given, none
    raise HoldfastError(f"federation is {named(given)}; it must come from holdfast.federate, or be a Dataset")


def _images() -> Dataset:
    """Small noisy images of four classes."""
    rng = np.random.default_rng(0)

    def part(samples: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(samples) % 4
        x = rng.integers(0, 160, (samples, 1, 4, 4))
        x[np.arange(samples), :, :, y] += 90
        return x.astype(np.uint8), y

    return Dataset.from_arrays(*part(64), *part(12), name="check")


def _network(dataset: Dataset, batchnorm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    inputs, outputs = int(np.prod(dataset.shape)), dataset.num_outputs
    norm = [nn.BatchNorm1d(8)] if batchnorm else []
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8, bias=False), *norm, nn.ReLU(), nn.Linear(8, outputs)
    )


def _small_federation(dataset: Dataset, public: np.ndarray) -> Federation:
    """Five clients with a few samples each, every one of which lacks a class."""
    strata = dataset.strata_train
    free = np.setdiff1d(np.arange(len(strata)), public)
    held = np.unique(strata[free])
    held = held[np.unique(np.linspace(0, len(held) - 1, MAX_CLASSES).astype(int))]
    unused = {int(c): free[strata[free] == c].tolist() for c in held}
    parts: list[list[int]] = []
    for client, size in enumerate(SIZES):
        lacks = int(held[client % len(held)]) if len(held) > 1 else None
        parts.append([])
        for turn in range(size):
            allowed = [c for c, ids in unused.items() if ids and c != lacks] or [
                c for c, ids in unused.items() if ids
            ]
            if not allowed:
                raise HoldfastError(
                    f"{dataset.name} has {len(free)} training samples; the check of a method needs at least "
                    f"{sum(SIZES)}"
                )
            parts[-1].append(unused[allowed[turn % len(allowed)]].pop(0))
    chosen = [id for part in parts for id in part]
    shared = public if len(public) else np.setdiff1d(free, chosen)
    small = _subset(dataset, np.array([*chosen, *shared[:PUBLIC]]))
    ends = np.cumsum(SIZES)
    return federate(
        small, np.split(np.arange(ends[-1]), ends[:-1]), public=np.arange(ends[-1], len(small.y_train))
    )


def _subset(dataset: Dataset, train: np.ndarray) -> Dataset:
    """These training samples, and a few test samples."""
    test = np.unique(np.linspace(0, len(dataset.y_test) - 1, TESTED).astype(int))
    groups = {n: Group(g.names, g.train[train], g.test[test]) for n, g in dataset.groups.items()}
    strata = dataset.given_strata
    return replace(
        dataset,
        x_train=dataset.x_train[train],
        y_train=dataset.y_train[train],
        x_test=dataset.x_test[test],
        y_test=dataset.y_test[test],
        groups=MappingProxyType(groups),
        given_strata=None if strata is None else strata[train],
    )
