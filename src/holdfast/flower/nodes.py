"""The nodes that are there, the clients each of them serves, and messages to them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.engine.clients import Incident
from holdfast.flower.messages import DESCRIBE, message
from holdfast.flower.population import SiteReport, describe_clients, in_a_line
from holdfast.flower.wire import WireError

LOOK_SECONDS = 60.0  # in which a node must say who it is
ERRORS = {2: "failed", 5: "site lost", 8: "site crashed"}
"""Flower's error codes in a word."""

_log = logging.getLogger("flwr")  # Flower shows what this says


class Nodes:
    """Which node serves which clients; a node is asked when it first appears."""

    def __init__(self, grid: Grid, dataset: Dataset) -> None:
        self.grid, self.dataset = grid, dataset
        self.reports: dict[int, SiteReport] = {}  # by node, the newest last
        self.of_client: dict[int, int] = {}

    def look(self, seconds: float = LOOK_SECONDS) -> None:
        """See who has come and who has gone; where Flower does not say, all is as it was."""
        try:
            online = set(self.grid.get_node_ids())
            strangers = sorted(online - self.reports.keys())
            asked = [message(DESCRIBE, node, {}, ttl=seconds) for node in strangers]
            replies = list(self.grid.send_and_receive(asked, timeout=seconds)) if asked else []
        except (
            Exception
        ) as error:  # of many types: refused calls, uploads that a restart cut, replies it cannot read
            _log.warning("Holdfast: the SuperLink does not answer: %s", _first_line(error))
            return
        self.reports = {node: report for node, report in self.reports.items() if node in online}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _log.warning("Holdfast: node %s: %s", node, in_a_line(reply.error.reason))
                continue
            try:
                report = SiteReport.read(reply, self.dataset.num_classes)
            except WireError as error:
                _log.warning("Holdfast: node %s says what makes no sense: %s", node, error)
                continue
            self._check(report)
            self.reports[node] = report
        self.of_client = {client: node for node, report in self.reports.items() for client in report.clients}

    def _check(self, report: SiteReport) -> None:
        """A site's samples must look like the server's."""
        who = f"the site of client {describe_clients(report.clients)}"
        if report.shape != list(self.dataset.shape):
            raise HoldfastError(
                f"{who} has samples of shape {report.shape}, the server of {list(self.dataset.shape)}"
            )
        if report.preprocess != json.dumps(asdict(self.dataset.preprocess), sort_keys=True):
            raise HoldfastError(f"{who} preprocesses samples otherwise than the server: {report.preprocess}")

    def wait_for(self, clients: int, fewest: int, seconds: float) -> dict[int, SiteReport]:
        """Wait until ``fewest`` of the clients 0 to ``clients`` - 1 are there; give their sites' reports."""
        ends = time.monotonic() + seconds
        while True:
            self.look()
            there = [k for k in range(clients) if k in self.of_client]
            if len(there) >= fewest:
                break
            if time.monotonic() >= ends:
                missing = describe_clients([k for k in range(clients) if k not in self.of_client])
                raise HoldfastError(
                    f"after {seconds:g} s client {missing} of {clients} is not there; start its SuperNode, with "
                    "a partition-id of its own, or lower clients"
                )
            time.sleep(1)
        served = [client for report in self.reports.values() for client in report.clients]
        twice = [k for k in there if served.count(k) > 1]
        if twice and fewest == clients:
            raise HoldfastError(
                f"client {describe_clients(twice)} is at two nodes; give each SuperNode a partition-id of its own"
            )
        return {client: self.reports[self.of_client[client]] for client in there}

    def ask(
        self, kind: str, content: Mapping[int, Mapping[str, Any]], seconds: float | None = None
    ) -> tuple[dict[int, Message], dict[int, Incident]]:
        """Send each node its records and wait for the replies: those that came, and what is known of the others."""
        sent = {node: message(kind, node, records, ttl=seconds) for node, records in content.items()}
        replies, faults = {}, {}  # type: dict[int, Message], dict[int, Incident]
        try:
            received = list(self.grid.send_and_receive(list(sent.values()), timeout=seconds)) if sent else []
        except Exception as error:  # as above; all are asked again
            return {}, {node: Incident(-1, "not reached", _first_line(error)) for node in sent}
        node_of = {one.metadata.message_id: node for node, one in sent.items()}
        for reply in received:
            # A reply that Flower makes up for a dead node does not name it.
            node = node_of.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if node not in sent:
                continue
            if reply.has_error():
                code, reason = reply.error.code, in_a_line(reply.error.reason)
                faults[node] = Incident(-1, ERRORS.get(code, "failed"), reason)
            elif node in replies:
                faults[node] = Incident(-1, "answered twice", "the first answer counts")
            else:
                replies[node] = reply
        return replies, faults


def _first_line(error: Exception) -> str:
    """The first line of an error of Flower's transport, which says the most."""
    line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {line[:500]}"
