"""The connected nodes, the clients of each node, and messages to them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.engine.clients import Incident
from holdfast.flower.description import described_dataset
from holdfast.flower.messages import DESCRIBE, ConfigReader, digest_of, make_message
from holdfast.flower.population import MAX_DESCRIPTION, SiteReport, format_clients
from holdfast.flower.sealing import check_seal, new_binding
from holdfast.flower.wire import WireError

DESCRIBE_SECONDS = 60.0  # timeout for a new node's report
ERROR_KINDS = {2: "failed", 5: "site lost", 8: "site crashed"}
"""The kind of incident by Flower's error code."""

Result = TypeVar("Result")

_log = logging.getLogger("flwr")  # the logger whose records Flower displays


class Nodes:
    """The connected nodes and their clients; each node is requested to report when it first connects."""

    def __init__(self, grid: Grid, dataset: Dataset | None, code: Mapping[str, str] | None = None) -> None:
        """``code`` are the hashes of files with methods and models, which every site must have.

        ``dataset`` is the server's; None for a server without data, which uses the sites' description of theirs.
        """
        self.grid, self.described = grid, dataset
        self.description: str | None = None  # which all sites must have, if the server has no data
        self.code = {"code": ConfigRecord(dict(code))} if code else {}
        self.refusals: dict[int, str] = {}  # the reasons why connected nodes have no report
        self.reports: dict[int, SiteReport] = {}  # by node, in the order of arrival
        self.of_client: dict[int, int] = {}  # the node of each client

    @property
    def dataset(self) -> Dataset:
        """The server's data set, or the one without samples that sites describe."""
        if self.described is None:
            raise HoldfastError("no site has described its data set yet")
        return self.described

    def refresh(self, seconds: float = DESCRIBE_SECONDS) -> None:
        """Update the connected nodes; unchanged if the SuperLink cannot be reached."""
        try:
            online = set(self.grid.get_node_ids())
            new = sorted(online - self.reports.keys())
            replies, faults = self._exchange(DESCRIBE, {node: {} for node in new}, seconds)
        except Exception as error:  # of many types: refused calls, interrupted uploads, unreadable replies
            _log.warning("Holdfast: the SuperLink does not answer: %s", _first_line(error))
            return
        self.reports = {node: report for node, report in self.reports.items() if node in online}
        self.refusals = {node: fault.detail for node, fault in faults.items()}
        for node, refusal in self.refusals.items():
            _log.warning("Holdfast: node %s: %s", node, refusal)
        for node, reply in replies.items():
            try:
                report = self._read_report(reply)
            except WireError as error:
                _log.warning("Holdfast: node %s sends an invalid report: %s", node, error)
                continue
            self._check(report)
            self.reports[node] = report
        self.of_client = {client: node for node, report in self.reports.items() for client in report.clients}

    def _read_report(self, reply: Message) -> SiteReport:
        """The report in a node's reply; the first one describes the data set of a server without data."""
        if self.described is not None:
            return SiteReport.from_message(reply, self.described.num_classes)
        found = SiteReport.properties(reply)
        dataset = described_dataset(
            found.text("dataset", MAX_DESCRIPTION), found.integers("shape"), found.text("preprocess")
        )
        report = SiteReport.from_message(reply, dataset.num_classes)
        self.described, self.description = dataset, report.dataset
        return report

    def _check(self, report: SiteReport) -> None:
        """Raise an error if a site's samples differ in kind from the server's."""
        site = f"the site of client {format_clients(report.clients)}"
        if self.description is not None and report.dataset != self.description:
            raise HoldfastError(
                f"the data set of {site} differs from that of the first site: {report.dataset[:300]}, not "
                f"{self.description[:300]}; name, types, classes (or bins) and task must be the same at all sites"
            )
        if report.shape != list(self.dataset.shape):
            raise HoldfastError(
                f"{site} has samples of shape {report.shape}, but the server has samples of shape "
                f"{list(self.dataset.shape)}"
            )
        if report.preprocess != json.dumps(asdict(self.dataset.preprocess), sort_keys=True):
            raise HoldfastError(
                f"{site} preprocesses samples differently from the server: {report.preprocess}"
            )

    def wait_for(self, clients: int, min_clients: int, seconds: float) -> dict[int, SiteReport]:
        """Wait until ``min_clients`` of the clients 0 to ``clients`` - 1 are connected; return their sites' reports.

        After ``seconds`` it raises an error that names the missing clients.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.refresh()
            connected = [k for k in range(clients) if k in self.of_client]
            if len(connected) >= min_clients:
                break
            if time.monotonic() >= deadline:
                missing = format_clients([k for k in range(clients) if k not in self.of_client])
                refused = "".join(
                    f"; node {node} answers: {reason}" for node, reason in self.refusals.items()
                )
                raise HoldfastError(
                    f"after {seconds:g} s client {missing} of {clients} is not connected; start its SuperNode, "
                    f"with its own partition-id, or lower clients{refused}"
                )
            time.sleep(1)
        served = [client for report in self.reports.values() for client in report.clients]
        twice = [k for k in connected if served.count(k) > 1]
        if twice and min_clients == clients:
            raise HoldfastError(
                f"client {format_clients(twice)} is on two nodes; give each SuperNode its own partition-id"
            )
        return {client: self.reports[self.of_client[client]] for client in connected}

    def request(
        self, kind: str, content: Mapping[int, Mapping[str, Any]], seconds: float | None = None
    ) -> tuple[dict[int, Message], dict[int, Incident]]:
        """Send each node its records and wait for the replies.

        Returns the replies and the incidents by node; a node without a reply in time has neither.
        """
        try:
            return self._exchange(kind, content, seconds)
        except Exception as error:  # as in `refresh`; the caller tries again
            return {}, {node: Incident(-1, "not reached", _first_line(error)) for node in content}

    def read_reply(
        self,
        client: int,
        replies: Mapping[int, Message],
        faults: Mapping[int, Incident],
        read: Callable[[RecordDict], Iterator[Result | Incident]],
        seconds: float | None,
    ) -> Iterator[Result | Incident]:
        """A client's part of its site's reply, or the incident that prevents it, after a wait of ``seconds``."""
        node = self.of_client.get(client)
        if node is None:
            yield Incident(client, "offline", "no node serves it now")
            return
        fault = faults.get(node)
        if fault is not None:
            yield replace(fault, client=client)
        if node in replies:
            try:
                _raise_failure(client, replies[node].content)
                yield from read(replies[node].content)
            except WireError as error:
                digest = digest_of(replies[node].content, client)
                yield Incident(client, error.kind, str(error), digest)
        elif fault is None:
            yield Incident(client, "late", "" if seconds is None else f"after {seconds:g} s")

    def _exchange(
        self, kind: str, content: Mapping[int, Mapping[str, Any]], seconds: float | None
    ) -> tuple[dict[int, Message], dict[int, Incident]]:
        """`request` without handling of the errors of Flower's transport."""
        requests = {
            node: make_message(kind, node, {**records, **self.code, **new_binding()}, ttl=seconds)
            for node, records in content.items()
        }
        replies, faults = {}, {}  # type: dict[int, Message], dict[int, Incident]
        messages = list(requests.values())
        received = list(self.grid.send_and_receive(messages, timeout=seconds)) if messages else []
        node_of = {message.metadata.message_id: node for node, message in requests.items()}
        for reply in received:
            # A reply that Flower makes for a lost node does not name the node.
            node = node_of.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if node not in requests:
                continue
            if reply.has_error():
                code, reason = reply.error.code, last_line(reply.error.reason)
                faults[node] = Incident(-1, ERROR_KINDS.get(code, "failed"), reason)
                continue
            try:
                if reply.metadata.src_node_id != node:
                    raise WireError("forged", f"it comes from node {reply.metadata.src_node_id}")
                check_seal(requests[node].content, reply.content)
            except WireError as error:
                faults[node] = Incident(-1, error.kind, str(error))
                continue
            if node in replies:
                faults[node] = Incident(-1, "answered twice", "the first answer counts")
            else:
                replies[node] = reply
        return replies, faults


def _raise_failure(client: int, content: RecordDict) -> None:
    """Raise a `WireError` if the client sent an error in place of a result."""
    if f"failed {client}" in content:
        detail = ConfigReader(content, f"failed {client}").text("detail")
        raise WireError("failed", last_line(detail))


def last_line(text: object) -> str:
    """The last line that is not empty, at most 500 characters: the error message of a traceback."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _first_line(error: Exception) -> str:
    """Type and first line of an error of Flower's transport, whose further lines are details."""
    line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {line[:500]}"
