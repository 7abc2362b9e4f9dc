"""Trains several clients in parallel threads, which uses a CPU better than parallel operations within one client."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import torch

from holdfast.core.settings import Settings
from holdfast.core.trees import clone
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Job
from holdfast.engine.sequential import SequentialEngine
from holdfast.methods.base import Method
from holdfast.methods.context import RunContext


class ThreadPoolEngine:
    """Several `SequentialEngine`s in threads of this process, each with its own copy of the model.

    Results do not depend on the assignment of clients to workers: all workers use the same number of threads for
    arithmetic, and results are yielded in the order of the jobs.
    """

    name = SequentialEngine.name
    group = SequentialEngine.group
    train_masked = None

    def __init__(
        self, method: Method, context: RunContext, data: DeviceData, settings: Settings, workers: int
    ) -> None:
        self.threads_per_worker = torch.get_num_threads() // workers
        self.free_engines: SimpleQueue[SequentialEngine] = SimpleQueue()
        for _ in range(workers):
            self.free_engines.put(
                SequentialEngine(method, replace(context, network=context.network.clone()), data, settings)
            )
        self.workers = workers
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="client")

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult]:
        """Train the clients. Results are in the order of ``jobs``; their tensors are copies and stay valid."""
        futures: deque[Future[ClientResult]] = deque()
        remaining = iter(jobs)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads_per_worker)
        try:
            while True:
                # More jobs than workers, so that workers stay busy while the next result in order is not ready.
                while len(futures) < 2 * self.workers and (job := next(remaining, None)) is not None:
                    futures.append(self.pool.submit(self._train_one, sent, job))
                if not futures:
                    return
                yield futures.popleft().result()
        finally:
            torch.set_num_threads(threads)
            for future in futures:
                future.cancel()

    def _train_one(self, sent: Broadcast, job: Job) -> ClientResult:
        engine = self.free_engines.get()
        try:
            (result,) = engine.train(sent, [job])
            return _copy_result(result)
        finally:
            self.free_engines.put(engine)


def _copy_result(result: ClientResult) -> ClientResult:
    """A copy of the result: the engine reuses its tensors for the next client."""
    params, buffers, sums, client_state = map(
        clone, (result.params, result.buffers, result.sums, result.client_state)
    )
    shared = params if result.shared is result.params else clone(result.shared)
    return replace(
        result, params=params, buffers=buffers, shared=shared, sums=sums, client_state=client_state
    )
