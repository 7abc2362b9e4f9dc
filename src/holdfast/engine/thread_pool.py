"""One client after another on every core at once: a CPU's threads share clients better than the steps of one."""

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
    """Several `Sequential` engines in threads of this process, each with a working copy of its own.

    A client's bits do not depend on who trains it or when: every worker has the same number of threads for its
    arithmetic, and results come in the order of the jobs.
    """

    name = SequentialEngine.name
    group = SequentialEngine.group

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
        """Train the clients; results come in their order and are the caller's to keep."""
        waiting: deque[Future[ClientResult]] = deque()
        left = iter(jobs)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads_per_worker)
        try:
            while True:
                # A few beyond those at work, so that nobody waits for a slow neighbour's result to be taken.
                while len(waiting) < 2 * self.workers and (job := next(left, None)) is not None:
                    waiting.append(self.pool.submit(self._train_one, sent, job))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            torch.set_num_threads(threads)
            for future in waiting:
                future.cancel()

    def _train_one(self, sent: Broadcast, job: Job) -> ClientResult:
        engine = self.free_engines.get()
        try:
            (result,) = engine.train(sent, [job])
            return _copy_result(result)
        finally:
            self.free_engines.put(engine)


def _copy_result(result: ClientResult) -> ClientResult:
    """A copy, since the working copy of the model trains the next client now."""
    params, buffers, sums, client_state = map(clone, (result.params, result.buffers, result.sums, result.client_state))
    shared = params if result.shared is result.params else clone(result.shared)
    return replace(result, params=params, buffers=buffers, shared=shared, sums=sums, client_state=client_state)
