"""Flower without its processes: a grid that calls the client app in this process, with optional faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Fault = Callable[[Message, Message], list[Message]]
"""The replies delivered for a message and its reply: none, another, or several."""

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class LocalGrid(Grid):
    """As many nodes as there are node configs, with ids from 101."""

    def __init__(self, client_app: Any, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self.app, self.config = client_app, config
        self.nodes = {101 + i: node for i, node in enumerate(nodes)}
        self.fault: Fault = lambda asked, reply: [reply]
        self.keeps = True  # what was sent and received, to be looked at
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.contexts: dict[int, Context] = {}  # a node keeps what its app keeps in it
        self._count = 0

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies: list[Message] = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"m{self._count}"
            answers = self.fault(message, self._answer(message))
            replies += answers
            if self.keeps:
                self.sent.append(message)
                self.received += answers
        return replies

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(5, "gone"), reply_to=message)
        context = self.contexts.setdefault(
            node, Context(1, node, self.nodes[node], RecordDict(), self.config)
        )
        TaskIdentity.node_id = node
        try:
            reply: Message = self.app(copy.copy(message), context)
        except Exception as error:
            reply = Message(Error(2, f"Traceback\n{type(error).__name__}: {error}"), reply_to=message)
        TaskIdentity.node_id = 1
        reply.metadata.__dict__["_src_node_id"] = node
        return reply
