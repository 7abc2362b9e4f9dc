"""The rounds of a run: who takes part, what is sent, what is learnt, what is recorded."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from holdfast import metrics
from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.core.trees import add_, leaves, size_in_bytes, tensors_only
from holdfast.data.federation import Federation
from holdfast.data.schedules import StageSchedule
from holdfast.engine.clients import Broadcast, ClientResult, ClientRunner, Incident, Job
from holdfast.engine.evaluation import Evaluation, Testing, TestSet
from holdfast.engine.local_records import LocalRecords
from holdfast.engine.probe import Probe
from holdfast.engine.stream_evaluation import StreamEvaluation
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.methods.base import Method, Server, Tensors, Tree, Upload
from holdfast.methods.context import RunContext


class Engine(Protocol):
    """Whatever trains the clients of a round."""

    name: str
    group: int

    def train(self, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[ClientResult | Incident]:
        """Train each client; a result's tensors are valid until the next one is asked for."""


class ClientStateStore(Protocol):
    """Where what clients remember is kept between their rounds."""

    def get(self, client: int) -> Tree | None:
        """What this client remembers, None before it first took part."""

    def put(self, client: int, memory: Tree) -> None:
        """Remember a copy."""


@dataclass(eq=False)
class UploadSums:
    """What the clients of a round have sent so far."""

    total: float = 0.0
    params: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    sums: Tree = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    bytes: int = 0  # beside the models


@dataclass(eq=False)
class PendingRound:
    """A round whose new model is still to be tested, or under test."""

    record: dict[str, Any]
    begin_test: Callable[[], Testing] | None
    seconds: float  # that it took so far
    examined: float  # of them, spent on tests that are done
    testing: Testing | None = None

    def test(self) -> None:
        """Have the new model tested if it should be, once; on a GPU without waiting for it."""
        if self.begin_test is not None:
            self.testing, self.begin_test = self.begin_test(), None


class RoundLoop:
    """Runs rounds; holds the server and calls the engine."""

    def __init__(
        self,
        method: Method,
        context: RunContext,
        federation: Federation,
        engine: Engine,
        settings: Settings,
        memories: ClientStateStore,
        test: TestSet,
        local_test: TestSet,
        side: ClientRunner,
        probe_batch: TestSet | None = None,
    ) -> None:
        self.method, self.context, self.federation = method, context, federation
        self.engine, self.settings, self.memories = engine, settings, memories
        self.test, self.local_test, self.side = test, local_test, side
        network = context.network
        state = tensors_only(method.init_server_state(context), method.name, "init_server_state")
        self.server = Server(dict(network.params), dict(network.buffers), state)
        self.before: np.ndarray | None = None  # [C] accuracy by class of the model last tested
        self.before_local: np.ndarray | None = None  # of the model to be sent, on local models' samples
        # What a loop has must not keep it alive: a run's tensors go with it, not when Python looks for cycles.
        here = weakref.proxy(self)
        self.stream = StreamEvaluation(here, side) if federation.schedule is not None else None
        self.probe_batch = probe_batch
        self._counted: tuple[int, np.ndarray, np.ndarray] | None = None
        self._online: tuple[int, np.ndarray] | None = None
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None
        self.picture: dict[str, Any] | None = None  # the last probe's, for the report
        if isinstance(engine, VectorizedEngine):
            engine.upcoming = lambda round: here.upcoming(round)
            engine.meanwhile = lambda: here._test_last()
        self._last: PendingRound | None = None

    # Who takes part -------------------------------------------------------------------------------------

    def stage(self, round: int) -> int:
        """Which stage of a stream this round trains."""
        schedule = self.federation.schedule
        return 0 if schedule is None else schedule.stage(round)

    def participants(self, round: int) -> np.ndarray:
        """The sampled clients: drawn without replacement from those that hold data now."""
        schedule = self.federation.schedule
        turn = round if schedule is None else schedule.epoch(round)
        sizes, present = self._present(self.stage(round))
        if not len(present):
            raise HoldfastError(f"round {round}: no client holds any sample at stage {self.stage(round)}")
        wanted = self.settings.clients_per_round
        if wanted is None:
            return present
        # Within an epoch the same clients take part in every stage; one without data at a stage sits it out.
        anyone = present if schedule is None else self._present_in_epoch(round, schedule)
        if wanted >= len(anyone):
            return present
        drawn = generator(self.settings.seed, "clients", turn)
        chosen = drawn.choice(anyone, wanted, replace=False, shuffle=True)
        here = chosen[sizes[chosen] > 0]
        return here if len(here) else present[:1]

    def _present_in_epoch(self, round: int, schedule: StageSchedule) -> np.ndarray:
        """Who holds any data at one of the stages that the epoch of this round trains; counted once an epoch."""
        epoch = schedule.epoch(round)
        if self._online is None or self._online[0] != epoch:
            rounds = range(1, max(round, self.settings.rounds) + 1)
            stages = {schedule.stage(r) for r in rounds if schedule.epoch(r) == epoch}
            held = sum(self.federation.sizes(stage) for stage in stages)
            self._online = (epoch, np.flatnonzero(held))
        return self._online[1]

    def _present(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of all clients at a stage, and who holds any data; counted once a stage, not once a round."""
        if self._counted is None or self._counted[0] != stage:
            sizes = self.federation.sizes(stage)
            self._counted = (stage, sizes, np.flatnonzero(sizes))
        return self._counted[1], self._counted[2]

    def _draw(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Who trains in a round, and who was sampled but drops out."""
        if self._drawn is None or self._drawn[0] != round:
            sampled = self.participants(round)
            lost = np.zeros(len(sampled), bool)
            if self.settings.client_dropout:
                drawn = generator(self.settings.seed, "dropout", round).random(len(sampled))
                lost = drawn < self.settings.client_dropout
            self._drawn = (round, sampled[~lost], sampled[lost])
        return self._drawn[1], self._drawn[2]

    def upcoming(self, round: int) -> list[Job]:
        """The clients of a later round, as far as they can be known now; none if it cannot take place."""
        if round > self.settings.rounds:
            return []
        stage = self.stage(round)
        if not len(self._present(stage)[1]):
            return []  # which is said when that round begins
        return [Job(int(k), self.federation.client(int(k), stage), stage) for k in self._draw(round)[0]]

    # One round ------------------------------------------------------------------------------------------

    def round(self, number: int) -> dict[str, Any]:
        """Do one round (from 1) and return its record."""
        return self.settle(self.launch(number))

    def launch(self, number: int) -> PendingRound:
        """Do one round, but do not test its new model yet: a GPU does that in the midst of the next round.

        Rounds must be settled in their order, and before the next is launched where local models are tested: what
        they forgot is told against what the global model knew.
        """
        began = time.perf_counter()
        method, server, settings = self.method, self.server, self.settings
        server.round = number
        if self.before_local is None and settings.evaluate_locals:
            self.before_local = self.evaluate_global(self.local_test).class_accuracy
        if self.stream is not None and number == 1:
            self.stream.before_training()
        stage = self.stage(number)
        present, lost = self._draw(number)
        payload = tensors_only(method.broadcast(server), method.name, "broadcast")
        sent = Broadcast(number, server.params, server.buffers, payload)
        jobs = [self._job(int(k), stage) for k in present]
        gathered, local, probe = UploadSums(), LocalRecords(self), self._begin_probe(number)
        incidents = [Incident(int(k), "dropout") for k in lost]
        incidents += self._receive(sent, jobs, gathered, local, probe)
        if jobs and len(local.clients) < settings.min_clients:
            raise too_few_updates(number, len(local.clients), settings.min_clients, incidents)
        if gathered.total:
            self._merge(gathered)
        model = {**server.params, **server.buffers}
        model_bytes = size_in_bytes({k: v for k, v in model.items() if k not in self.side.home})
        down = size_in_bytes(sent.payload) + model_bytes
        record = {"round": number, "stage": stage, "lr": settings.lr_at(number), **local.record()} | {
            "bytes_down": down * len(jobs) + sum(size_in_bytes(job.payload) for job in jobs),
            "bytes_up": gathered.bytes + model_bytes * len(local.clients),
            "incidents": [incident.record() for incident in incidents],
        }
        trained = time.perf_counter()
        if self.stream is not None and settings.evaluate_locals:
            record["stream"] = self.stream.after_round(number, local.clients)
        if probe is not None and probe.clients:
            record["probe"] = probe.record(self.server)
            self.picture = probe.picture() if number == settings.rounds else None
        examined = local.seconds + time.perf_counter() - trained
        tested = number % settings.evaluate_every == 0 or number == settings.rounds
        begin_test = partial(self._begin_test, self.test, replace(self.server)) if tested else None
        self._last = PendingRound(record, begin_test, time.perf_counter() - began, examined)
        return self._last

    def while_waiting(self, work: Callable[[], None] | None) -> None:
        """Have something done in every round while a GPU works off its steps; None for nothing more."""
        if isinstance(self.engine, VectorizedEngine):
            self.engine.before_waiting = work

    def settle(self, launched: PendingRound) -> dict[str, Any]:
        """The record of a round, when its tests are done."""
        began = time.perf_counter()
        launched.test()
        record, testing, tested = launched.record, launched.testing, launched.examined
        if testing is not None:
            record |= self._compare(testing.wait())
            if "locals" in record and self.before_local is not None:
                record["locals"]["global_after"] = self.before_local.tolist()
            tested += testing.seconds
        else:
            self.before_local = None  # it is of an older model: the next round tests the one it sends out
        total = launched.seconds + time.perf_counter() - began
        record["seconds"] = {"train": total - tested, "evaluate": tested, "total": total}
        return record

    def _job(self, client: int, stage: int) -> Job:
        down = tensors_only(self.method.broadcast_to(self.server, client), self.method.name, "broadcast_to")
        return Job(client, self.federation.client(client, stage), stage, down, self.memories.get(client))

    def _begin_probe(self, number: int) -> Probe | None:
        """A look inside the models, every so many rounds and in the last."""
        settings = self.settings
        if self.probe_batch is None or not (number % settings.probe_every == 0 or number == settings.rounds):
            return None
        return Probe(self.context, self.probe_batch, self.server)

    def _receive(
        self,
        sent: Broadcast,
        jobs: Sequence[Job],
        gathered: UploadSums,
        local: LocalRecords,
        probe: Probe | None,
    ) -> list[Incident]:
        """Have the clients trained and take in what they send; what went wrong is returned."""
        incidents = []
        for result in self.engine.train(sent, jobs):
            if isinstance(result, Incident):
                incidents.append(result)
                continue
            wrong = validate_update(result, self.server)
            if wrong is not None:
                incidents.append(Incident(result.client, wrong))
                continue
            self._gather(gathered, result)
            self.memories.put(result.client, result.memory)
            local.add(result, self.server)
            if probe is not None:
                ids = self.federation.client(result.client, self.stage(sent.round))
                probe.add(result, *self.context.read(ids))
        local.flush()
        return incidents

    def _gather(self, gathered: UploadSums, result: ClientResult) -> None:
        weight = result.weight
        if not gathered.params:
            gathered.params = {k: torch.zeros_like(v) for k, v in result.shared.items()}
            gathered.buffers = {k: torch.zeros_like(v) for k, v in result.buffers.items()}
        gathered.total += weight
        with torch.no_grad():
            torch._foreach_add_(list(gathered.params.values()), [result.shared[k] for k in gathered.params],
                                alpha=weight)  # fmt: skip
            for k, b in gathered.buffers.items():
                # Counters are integers: the federation's is the largest, not the mean.
                if b.is_floating_point():
                    b.add_(result.buffers[k], alpha=weight)
                else:
                    torch.maximum(b, result.buffers[k], out=b)
        add_(gathered.sums, result.sums)
        gathered.bytes += size_in_bytes(result.sums)
        if self.method.keeps_uploads:
            gathered.uploads.append(
                Upload(
                    result.client,
                    weight,
                    {k: v.clone() for k, v in result.shared.items()},
                    {k: v.clone() for k, v in result.buffers.items()},
                    result.sums,
                )
            )

    def _merge(self, gathered: UploadSums) -> None:
        method, server = self.method, self.server
        # Contiguous, as they come back from a checkpoint: a layout must not decide how sums round.
        mean = {k: (v / gathered.total).contiguous() for k, v in gathered.params.items()}
        buffers = {k: v / gathered.total if v.is_floating_point() else v for k, v in gathered.buffers.items()}
        params, state = method.aggregate(server, mean, gathered.sums, self.context)
        if params.keys() != server.params.keys():
            raise HoldfastError(
                f"{method.name}: aggregate must give every parameter of the model, and no others"
            )
        server = Server(params, buffers, tensors_only(state, method.name, "aggregate"), server.round)
        state = method.update(server, gathered.sums, gathered.uploads, self.context)
        server.state = tensors_only(state, method.name, "update")
        self.server = method.refine(server, gathered.uploads, self.context)

    # Testing --------------------------------------------------------------------------------------------

    def evaluate_global(self, test: TestSet | None = None) -> Evaluation:
        """Test the global model, on the whole test set by default."""
        return self._begin_test(test or self.test, self.server).wait()

    def _test_last(self) -> None:
        """Have the last round's model tested now, if it is not yet."""
        if self._last is not None:
            self._last.test()

    def _begin_test(self, test: TestSet, server: Server) -> Testing:
        method = self.method
        return test.begin(
            method.eval_params(server), server.buffers, lambda out: method.global_logits(out, server)
        )

    def seen(self) -> dict[str, np.ndarray]:
        """What the next round's record compares with; goes into checkpoints."""
        both = {"all": self.before, "local": self.before_local}
        kept = {} if self.stream is None else self.stream.state()
        return {name: value for name, value in both.items() if value is not None} | kept

    def remember(self, seen: dict[str, np.ndarray]) -> None:
        """Take up what ``seen`` gave."""
        self.before, self.before_local = seen.get("all"), seen.get("local")
        if self.stream is not None:
            self.stream.restore(seen)

    def test_final(self) -> dict[str, Any]:
        """Test once more, after a method has changed the model at the end."""
        return _tested(self.evaluate_global())

    def _compare(self, now: Evaluation) -> dict[str, Any]:
        """What is recorded of a new global model, and of what it forgot since it was last tested."""
        record = _tested(now)
        if self.before is not None:
            both = np.stack([self.before, now.class_accuracy])
            record["forgetting"] = float(metrics.round_forgetting(both)[0])
        self.before = now.class_accuracy
        if self.settings.evaluate_locals:
            self.before_local = self.local_test.class_accuracy_within(now)
        return record


def _tested(model: Evaluation) -> dict[str, Any]:
    """What is recorded of the global model."""
    record = {"accuracy": model.accuracy, "loss": model.loss, "class_accuracy": model.class_accuracy.tolist()}
    return record | ({"domain_accuracy": model.domain_accuracy} if model.domain_accuracy else {})


def validate_update(result: ClientResult, server: Server) -> str | None:
    """What is wrong with a client's upload, if anything: it must look like the model and hold only numbers."""
    for expected, got in ((server.params, result.shared), (server.buffers, result.buffers)):
        if expected.keys() != got.keys():
            return "wrong keys"
        if any(expected[k].shape != got[k].shape for k in expected):
            return "wrong shape"
        if any(expected[k].dtype != got[k].dtype for k in expected):
            return "wrong dtype"
    # The engine has looked at the trained parameters, which most methods share as they are.
    shared = {} if result.shared is result.params else result.shared
    told = {"shared": shared, "buffers": result.buffers, "sums": result.sums}
    values = [v for _, v in leaves(told) if v.is_floating_point() and v.numel()]
    finite = result.finite
    if finite and values:
        largest = torch.stack(torch._foreach_norm(values, float("inf")))
        finite = bool(torch.isfinite(largest).all())
    return None if finite else "not finite"


def too_few_updates(round: int, usable: int, wanted: int, incidents: Sequence[Incident]) -> HoldfastError:
    """The error for a round that cannot be closed, which the last complete round outlives."""
    what = ", ".join(f"client {i.client}: {i.kind}" for i in incidents[:10])
    left = (
        "no usable update is left" if not usable else f"{usable} usable updates came, min_clients is {wanted}"
    )
    kinds = {incident.kind for incident in incidents}
    hint = "resume the run when the clients are back"
    if "not finite" in kinds:
        hint = "lower the learning rate?"
    elif kinds and kinds <= {"wrong keys", "wrong shape", "wrong dtype"}:
        hint = "what clients share must have the names, shapes and types of the model's parameters"
    return HoldfastError(f"round {round}: {left} ({what}); {hint}")
