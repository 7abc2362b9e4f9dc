"""The rounds of a run: sampling, broadcast, local training, aggregation, evaluation, records."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from holdfast import metrics
from holdfast.core.digests import PendingDigest
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import size_in_bytes, tensors_only
from holdfast.data.federation import Federation
from holdfast.engine.aggregation import PrivateSums, UploadSums, too_few_updates, validate_update
from holdfast.engine.base import ClientStateStore, Engine, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, ClientRunner, Incident, Job
from holdfast.engine.evaluation import Evaluation, PendingEvaluation, TestSet, evaluated_model
from holdfast.engine.local_records import LocalRecords
from holdfast.engine.probe import Probe
from holdfast.engine.sampling import ClientSampler
from holdfast.engine.secure_sums import SecureSums
from holdfast.engine.stream_evaluation import StreamEvaluation
from holdfast.engine.uploads import RobustSums, RoundUploads
from holdfast.engine.validation import PendingMetrics, Validation, validation_record
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.context import RunContext
from holdfast.updates.attacks import Backdoor, marked_test, parse_attack
from holdfast.updates.compression import parse_compression
from holdfast.updates.privacy import ClientPrivacy
from holdfast.updates.robust import parse_robust
from holdfast.updates.sample_privacy import SampleAccount
from holdfast.updates.secure import parse_secure


@dataclass(eq=False)
class Tests:
    """The tests of a new global model, which may be running."""

    __test__ = False  # not a pytest class

    test: PendingEvaluation | None  # None without test samples
    validation: PendingMetrics | None


@dataclass(eq=False)
class RoundAudit:
    """The fields of a round in the audit log besides its record."""

    asked: list[int]
    used: list[int]
    received: dict[int, str]
    refused: dict[int, str]
    model: PendingDigest

    def entry(self) -> dict[str, Any]:
        """The entry; waits for the digest of the new model."""
        hashes = {"received": self.received, "refused": self.refused}
        by_client = {key: {str(k): v for k, v in found.items()} for key, found in hashes.items() if found}
        return {"asked": self.asked, "used": self.used, **by_client, "model": self.model.wait()}


@dataclass(eq=False)
class PendingRound:
    """A trained round whose record is not complete: its model has not been tested, or the test is running."""

    record: dict[str, Any]
    start_tests: Callable[[], Tests] | None
    seconds: float  # so far
    test_seconds: float  # of these, spent on completed tests
    server: Server  # after the round
    local_validation: Sequence[PendingMetrics] = ()
    audit: RoundAudit | None = None
    tests: Tests | None = None

    def test(self) -> None:
        """Start the tests of the new model, once; a GPU runs them asynchronously."""
        if self.start_tests is not None:
            self.tests, self.start_tests = self.start_tests(), None


def sampler_of(federation: Federation, settings: Settings, privacy: ClientPrivacy | None) -> ClientSampler:
    """The sampler of a run's clients, which matches the privacy account."""
    if privacy is None:
        return ClientSampler(federation, settings)
    return ClientSampler(federation, settings, privacy.rate, privacy.secret)


class RoundLoop:
    """Runs rounds: holds the server's state and calls the engine."""

    def __init__(
        self,
        method: Method,
        context: RunContext,
        federation: Federation,
        engine: Engine,
        settings: Settings,
        client_states: ClientStateStore,
        test: TestSet,
        local_test: TestSet,
        runner: ClientRunner,
        probe_batch: TestSet | None = None,
        privacy: ClientPrivacy | None = None,
        validation: Validation | None = None,
        sample_privacy: SampleAccount | None = None,
        audited: bool = False,
    ) -> None:
        self.method, self.context, self.federation = method, context, federation
        self.engine, self.settings, self.client_states = engine, settings, client_states
        self.test, self.local_test, self.runner = test, local_test, runner
        self.probe_batch, self.privacy, self.validation = probe_batch, privacy, validation
        self.sample_privacy, self.audited = sample_privacy, audited
        self.sampler = sampler_of(federation, settings, privacy)
        self.attack = None if settings.attack is None else parse_attack(settings.attack)
        self.secure = None if settings.secure is None else parse_secure(settings.secure)
        self.robust = None if settings.robust is None else parse_robust(settings.robust)
        self.compression = None if settings.compress is None else parse_compression(settings.compress)
        self.hostile = (
            frozenset() if self.attack is None else self.attack.attackers(federation.clients, settings.seed)
        )
        self.backdoor_test = (
            TestSet(marked_test(self.attack, federation.dataset), context)
            if isinstance(self.attack, Backdoor) and len(federation.dataset.y_test)
            else None
        )
        state = tensors_only(method.init_server_state(context), method.name, "init_server_state")
        self.server = Server(dict(context.network.params), dict(context.network.buffers), state)
        # [C] accuracy (or the task's score) by class of the model last tested
        self.last_class_accuracy: np.ndarray | None = None
        self.local_test_accuracy: np.ndarray | None = None  # of the current global model, on `local_test`
        self.probe_features: dict[str, Any] | None = None  # of the last probe, for the report
        # A reference to the loop would keep a run's tensors alive until Python collects cycles.
        self.stream = (
            StreamEvaluation(weakref.proxy(self), runner) if federation.schedule is not None else None
        )
        self._pending: PendingRound | None = None

    def stage(self, round: int) -> int:
        """The stage of a stream that this round trains."""
        return self.sampler.stage(round)

    def upcoming(self, round: int) -> list[Job]:
        """The clients of a later round, without payloads and states; empty if the round cannot take place."""
        if round > self.settings.rounds or not self.sampler.anyone_has_data(round):
            return []  # the error is raised when that round begins
        stage = self.stage(round)
        return [
            Job(int(k), self.federation.client(int(k), stage), stage) for k in self.sampler.sample(round)[0]
        ]

    # One round ------------------------------------------------------------------------------------------

    def round(self, number: int) -> dict[str, Any]:
        """Run one round (from 1) and return its record."""
        return self.finish_round(self.start_round(number))

    def start_round(self, number: int, finish_last_round: Callable[[], None] | None = None) -> PendingRound:
        """Train and aggregate one round without a test of its model, which a GPU performs during the next round.

        Rounds are finished in order. If local models are tested, a round is finished before the next one starts, since
        forgetting is measured against the global model. ``finish_last_round`` is called while the engine waits.
        """
        began = time.perf_counter()
        method, server, settings = self.method, self.server, self.settings
        server.round = number
        if self.privacy is not None:
            self.privacy.check_budget(number)
        if self.local_test_accuracy is None and settings.evaluate_locals:
            self.local_test_accuracy = self.evaluate_global(self.local_test).class_accuracy
        if self.stream is not None and number == 1 and len(self.test):
            self.stream.before_training()
        stage = server.stage = self.stage(number)
        if method.overrides("begin_round"):
            state = method.begin_round(server, self.context)
            server.state = tensors_only(state, method.name, "begin_round")
        present, lost = self.sampler.sample(number)
        payload = tensors_only(method.broadcast(server), method.name, "broadcast")
        sent = Broadcast(number, server.params, server.buffers, payload)
        jobs = [self._job(int(k), stage) for k in present]
        if self.sample_privacy is not None:
            # Includes clients whose update is lost, since they have computed it.
            self.sample_privacy.spend([job.client for job in jobs])
        overlap = Overlap(partial(self.upcoming, number + 1), self._test_last_model)
        if finish_last_round is not None:
            overlap = replace(overlap, finish_last_round=finish_last_round)
        tested = number % settings.evaluate_every == 0 or number == settings.rounds
        uploads = self._new_uploads(jobs, lost.tolist())
        uploads.sums.check_clients()
        local, probe = LocalRecords(self, tested), self._new_probe(number)
        incidents = [Incident(int(k), "dropout") for k in lost]
        incidents += self._receive(sent, jobs, overlap, uploads, local, probe)
        if jobs and uploads.added < settings.min_clients:
            raise too_few_updates(number, uploads.added, settings.min_clients, incidents)
        uploads.sums.check(incidents)
        if uploads.sums.usable:
            self._aggregate(uploads.sums)
        model = {**server.params, **server.buffers}
        model_bytes = size_in_bytes({k: v for k, v in model.items() if k not in self.runner.private})
        bytes_per_client = size_in_bytes(sent.payload) + model_bytes
        record = {"round": number, "stage": stage, "lr": settings.lr_at(number), **local.record()} | {
            "bytes_down": bytes_per_client * len(jobs) + sum(size_in_bytes(job.payload) for job in jobs),
            "bytes_up": uploads.bytes(model_bytes * len(local.clients)),
            "incidents": [incident.record() for incident in incidents],
            **uploads.record(),
        }
        if self.sample_privacy is not None:
            record["sample_privacy"] = self.sample_privacy.record(record["participants"])
        trained = time.perf_counter()
        if self.stream is not None and settings.evaluate_locals:
            record["stream"] = self.stream.after_round(number, local.clients)
        if probe is not None and probe.clients:
            record["probe"] = probe.record(self.server)
            self.probe_features = probe.projection() if number == settings.rounds else None
        if self.backdoor_test is not None and tested:
            record["attack_success"] = self.evaluate_global(self.backdoor_test).accuracy
        test_seconds = local.seconds + time.perf_counter() - trained
        after = replace(self.server)
        audit = None
        if self.audited:
            refused = {i.client: i.digest for i in incidents if i.digest is not None}
            asked = [job.client for job in jobs]
            digest = PendingDigest({"params": after.params, "buffers": after.buffers})
            audit = RoundAudit(asked, uploads.used, uploads.received, refused, digest)
        start_tests = partial(self._start_tests, after) if tested else None
        seconds = time.perf_counter() - began
        self._pending = PendingRound(
            record, start_tests, seconds, test_seconds, after, local.validation, audit
        )
        return self._pending

    def finish_round(self, pending: PendingRound) -> dict[str, Any]:
        """The record of a round, once its tests are done."""
        began = time.perf_counter()
        pending.test()
        record, tests, tested = pending.record, pending.tests, pending.test_seconds
        if tests is None:
            self.local_test_accuracy = None  # outdated: the next round tests the model that it sends
        elif tests.test is not None:
            record |= self._compare_with_last(tests.test.wait())
            if "locals" in record and self.local_test_accuracy is not None:
                record["locals"]["global_after"] = self.local_test.measured(self.local_test_accuracy).tolist()
            tested += tests.test.seconds
        if tests is not None and tests.validation is not None:
            record["validation"] = self._validation_record([tests.validation])
            tested += tests.validation.seconds
        if pending.local_validation:
            record["local_validation"] = self._validation_record(pending.local_validation)
        total = pending.seconds + time.perf_counter() - began
        record["seconds"] = {"train": total - tested, "evaluate": tested, "total": total}
        return record

    def _job(self, client: int, stage: int) -> Job:
        payload = tensors_only(
            self.method.broadcast_to(self.server, client), self.method.name, "broadcast_to"
        )
        account = self.sample_privacy
        return Job(
            client,
            self.federation.client(client, stage),
            stage,
            payload,
            self.client_states.get(client),
            0.0 if account is None else account.noise_multiplier(client),
        )

    def _new_probe(self, number: int) -> Probe | None:
        """A probe in every ``probe_every``-th round and in the last."""
        settings = self.settings
        if self.probe_batch is None or not (number % settings.probe_every == 0 or number == settings.rounds):
            return None
        return Probe(self.context, self.probe_batch, self.server)

    def _receive(
        self,
        sent: Broadcast,
        jobs: Sequence[Job],
        overlap: Overlap,
        uploads: RoundUploads,
        local: LocalRecords,
        probe: Probe | None,
    ) -> list[Incident]:
        """Train the clients and sum their valid uploads; returns the incidents."""
        incidents = []
        states = {job.client: job.client_state for job in jobs}
        results, masked = self._train(sent, jobs, overlap, uploads.sums)
        for result in results if jobs else ():
            if isinstance(result, Incident):
                incidents.append(result)
                continue
            if self.sample_privacy is not None:
                self.sample_privacy.correct(result.client, result.protected_rounds)
            if masked:
                uploads.add_masked(result)
            else:
                added = self._add(result, uploads, states)
                if isinstance(added, Incident):
                    incidents.append(added)
                    continue
                result = added
            self.client_states.put(result.client, result.client_state)
            local.add(result, self.server)
            if probe is not None:
                ids = self.federation.client(result.client, self.stage(sent.round))
                probe.add(result, *self.context.read(ids))
        local.flush()
        return incidents + uploads.close()

    def _train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap, sums: UploadSums
    ) -> tuple[Iterator[ClientResult | Incident], bool]:
        """The clients' results, and whether the engine adds their uploads to ``sums``."""
        if isinstance(sums, SecureSums) and self.engine.train_masked is not None:
            return self.engine.train_masked(sent, jobs, sums), True
        return self.engine.train(sent, jobs, overlap), False

    def _add(
        self, result: ClientResult, uploads: RoundUploads, states: Mapping[int, Tree | None]
    ) -> ClientResult | Incident:
        """Add a result to the uploads; returns the result after decompression, or the reason for its rejection."""
        defect = validate_update(result, self.server)
        if defect is not None:
            return Incident(result.client, defect, digest=result.digest)
        if self.compression is not None:
            result = uploads.compressed(result, self.compression, states[result.client])
        return uploads.add(result) or result

    def _new_uploads(self, jobs: Sequence[Job], lost: Sequence[int]) -> RoundUploads:
        private = self.runner.private
        if self.secure is not None and jobs:
            seed, privacy = self.settings.seed, self.privacy
            sums: UploadSums = SecureSums.of(self.secure, jobs, lost, self.server, private, seed, privacy)
        elif self.privacy is not None:
            sums = PrivateSums(self.privacy, self.server, private)
        elif self.robust is not None:
            sums = RobustSums(self.robust, self.server, private)
        else:
            sums = UploadSums(self.method.keeps_uploads)
        return RoundUploads(
            sums, self.server, private, self.settings, self.attack, self.hostile, self.audited
        )

    def _aggregate(self, uploads: UploadSums) -> None:
        method, server = self.method, self.server
        mean, buffers = uploads.mean()
        params, state = method.aggregate(server, mean, uploads.sums, self.context)
        if params.keys() != server.params.keys():
            raise HoldfastError(f"{method.name}: aggregate must return exactly the parameters of the model")
        server = Server(params, buffers, tensors_only(state, method.name, "aggregate"), server.round)
        state = method.update(server, uploads.sums, uploads.uploads, self.context)
        server.state = tensors_only(state, method.name, "update")
        self.server = method.refine(server, uploads.uploads, self.context)

    # Evaluation -----------------------------------------------------------------------------------------

    def evaluate_global(self, test: TestSet | None = None) -> Evaluation:
        """Test the global model, on the whole test set by default."""
        return self._start_test(test or self.test, self.server).wait()

    def evaluate_final(self) -> dict[str, Any]:
        """Test the final model, after a method has changed it."""
        tests, record = self._start_tests(self.server), {}
        if tests.test is not None:
            record = self.test.record(tests.test.wait())
        if tests.validation is not None:
            record["validation"] = self._validation_record([tests.validation])
        return record

    def _test_last_model(self) -> None:
        """Start the test of the last round's model, unless it has started."""
        if self._pending is not None:
            self._pending.test()

    def _start_test(self, test: TestSet, server: Server) -> PendingEvaluation:
        params, buffers = evaluated_model(self.method, server)
        return test.start(params, buffers, lambda out: self.method.global_logits(out, server))

    def _start_tests(self, server: Server) -> Tests:
        validation = None if self.validation is None else self.validation.start(self.method, server)
        return Tests(self._start_test(self.test, server) if len(self.test) else None, validation)

    def _validation_record(self, tests: Sequence[PendingMetrics]) -> dict[str, Any]:
        assert self.validation is not None
        return validation_record(tests, self.validation.errors)

    def _compare_with_last(self, now: Evaluation) -> dict[str, Any]:
        """The metrics of a new global model, and its forgetting since the last test."""
        record = self.test.record(now)
        if self.last_class_accuracy is not None:
            both = np.stack([self.last_class_accuracy, now.class_accuracy])
            record["forgetting"] = float(metrics.round_forgetting(both)[0])
        self.last_class_accuracy = now.class_accuracy
        if self.settings.evaluate_locals:
            self.local_test_accuracy = self.local_test.class_accuracy_within(now)
        return record

    def updates_state(self) -> Tensors:
        """The state of privacy, compression and attacks between rounds, for checkpoints."""
        accounts = (self.privacy, self.sample_privacy)
        return {k: v for account in accounts if account is not None for k, v in account.state().items()}

    def restore_updates_state(self, state: Tensors) -> None:
        """Restore what ``updates_state`` returned."""
        for account in (self.privacy, self.sample_privacy):
            if account is not None and state:
                account.restore(state)

    def evaluation_state(self) -> dict[str, np.ndarray]:
        """The accuracies to which the next round's record refers, for checkpoints."""
        accuracies = {"all": self.last_class_accuracy, "local": self.local_test_accuracy}
        stream = {} if self.stream is None else self.stream.state()
        return {name: value for name, value in accuracies.items() if value is not None} | stream

    def restore_evaluation_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what ``evaluation_state`` returned."""
        self.last_class_accuracy, self.local_test_accuracy = state.get("all"), state.get("local")
        if self.stream is not None:
            self.stream.restore(state)
