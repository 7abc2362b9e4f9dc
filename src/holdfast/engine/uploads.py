"""Processing of a round's uploads: compression, attack, check of the norm, sum.

    engine ─ result ─▶ compression ─▶ attack ─▶ norm ─▶ sums (`UploadSums`, `PrivateSums`, `RobustSums`) ─▶ mean

Results are added as they arrive, unless a step needs all results of a round: an attack, or a limit relative to the
median.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from holdfast.core.digests import digest
from holdfast.core.settings import Settings
from holdfast.core.trees import Tensors, Tree, clone, leaves, size_in_bytes, tree_map, unflatten
from holdfast.engine.aggregation import UploadSums
from holdfast.engine.clients import ClientResult, Incident
from holdfast.methods.base import Server
from holdfast.updates.attacks import Attack
from holdfast.updates.compression import Compression
from holdfast.updates.privacy import total_norm
from holdfast.updates.robust import RobustMean
from holdfast.updates.secure import OutOfRange

LARGE = 10.0  # multiple of the median norm from which an update is an incident
ENOUGH = 4  # minimum number of updates for this comparison
LARGE_UPDATE = "large update"


class RoundUploads:
    """The uploads of one round.

    Updates are the changes of the shared parameters; private parameters (``private``) are excluded.
    ``hostile`` are the attackers among all clients.
    """

    def __init__(
        self,
        sums: UploadSums,
        server: Server,
        private: Collection[str],
        settings: Settings,
        attack: Attack | None,
        hostile: Collection[int],
        audited: bool = False,
    ) -> None:
        """``audited``: whether the hashes of uploads are kept; on a GPU only those of messages."""
        self.sums, self.server, self.settings, self.private = sums, server, settings, private
        self.names = [name for name in server.params if name not in private]
        self.attack = attack if attack is not None and attack.changes_updates else None
        self.hostile = hostile
        waits = self.attack is not None or settings.max_update_ratio is not None
        self.waiting: list[ClientResult] | None = [] if waits else None
        self.norms: dict[int, Tensor] = {}
        self.clients: list[int] = []
        self.audited = audited and sums.sees_uploads
        self.received: dict[int, str] = {}  # by client, the SHA-256 of its upload
        self.used: list[int] = []
        self.compressed_bytes = 0

    def add(self, result: ClientResult) -> Incident | None:
        """Add a valid result; returns the reason if it is rejected. Its tensors may be reused afterwards."""
        self.clients.append(result.client)
        if self.waiting is None:
            return self._add(result, self._norm(result), None)
        shared, buffers, sums = (clone(tree) for tree in (result.shared, result.buffers, result.sums))
        self.waiting.append(replace(result, shared=shared, buffers=buffers, sums=sums))
        return None

    def add_masked(self, result: ClientResult) -> None:
        """Record a client whose upload is part of the sum that the engine provides."""
        self.clients.append(result.client)
        self.used.append(result.client)
        self._note(result)

    def compressed(self, result: ClientResult, compression: Compression, state: Tree | None) -> ClientResult:
        """The result after compression and decompression; ``state`` is the client's state before the round."""
        before = {name: self.server.params[name] for name in self.names}
        result, sent = compressed(result, compression, before, state, self.settings.seed, self.server.round)
        buffers = {k: v for k, v in result.buffers.items() if k not in self.private}
        self.compressed_bytes += size_in_bytes(sent) + size_in_bytes(buffers)
        return result

    def close(self) -> list[Incident]:
        """Add the stored results; returns the rejected clients and those with suspiciously large updates."""
        incidents = []
        if self.waiting is not None:
            # Sorted: the sum then does not depend on the order in which an engine finishes clients.
            results = self._attacked(sorted(self.waiting, key=lambda result: result.client))
            norms = [self._norm(result) for result in results]
            middle = median(float(norm) for norm in norms) if norms else 0.0
            for result, norm in zip(results, norms, strict=True):
                incident = self._add(result, norm, middle)
                incidents += [] if incident is None else [incident]
        return incidents + self._large()

    @property
    def added(self) -> int:
        """The number of uploads in the sums."""
        return len(self.used)

    def bytes(self, models: int) -> int:
        """The bytes of all uploads; ``models`` is the size of the models if they are sent uncompressed."""
        if not self.sums.sees_uploads:
            return self.sums.bytes
        return self.sums.bytes + (models if self.settings.compress is None else self.compressed_bytes)

    def record(self) -> dict[str, Any]:
        """Further entries of the round's record."""
        attackers = [client for client in self.clients if client in self.hostile]
        return self.sums.record() | ({"attackers": attackers} if self.hostile else {})

    def _add(self, result: ClientResult, norm: Tensor, middle: float | None) -> Incident | None:
        """Add one result, unless its norm exceeds the limit; ``middle`` is the median norm of the round."""
        self._note(result)
        most, ratio = self.settings.max_update_norm, self.settings.max_update_ratio
        if most is not None and float(norm) > most:
            return _refused(result, float(norm), f"above max_update_norm {most:g}")
        if ratio is not None and middle is not None and float(norm) > ratio * middle:
            limit = f"{float(norm) / middle:.3g} times the median" if middle else "the median is 0"
            return _refused(result, float(norm), f"{limit}, above max_update_ratio {ratio:g}")
        try:
            self.sums.add(result)
        except OutOfRange as error:
            return Incident(result.client, "out of range", str(error))
        if self.sums.sees_uploads:
            self.norms[result.client] = norm
        self.used.append(result.client)
        return None

    def _note(self, result: ClientResult) -> None:
        """Store the hash of an upload as received."""
        if result.digest is not None:
            self.received[result.client] = result.digest
        elif self.audited and all(value.device.type == "cpu" for value in result.shared.values()):
            exchanged = {k: v for k, v in (result.shared | result.buffers).items() if k not in self.private}
            self.received[result.client] = digest({"model": exchanged, "sums": result.sums})

    def _norm(self, result: ClientResult) -> Tensor:
        with torch.no_grad():
            if not self.names or not self.sums.sees_uploads:
                return torch.zeros(())
            mine, before = (
                [tensors[k] for k in self.names] for tensors in (result.shared, self.server.params)
            )
            return total_norm(torch._foreach_sub(mine, before))

    def _large(self) -> list[Incident]:
        """The clients whose update norms far exceed the median."""
        if len(self.norms) < ENOUGH:
            return []
        norms = torch.stack(list(self.norms.values())).tolist()
        middle = median(norms)
        return [
            Incident(client, LARGE_UPDATE, f"norm {norm:.3g}, {norm / middle:.3g} times the median")
            for client, norm in zip(self.norms, norms, strict=True)
            if norm > LARGE * middle > 0
        ]

    def _attacked(self, results: Sequence[ClientResult]) -> list[ClientResult]:
        """The results, with the attackers' updates replaced."""
        bad = [result.client in self.hostile for result in results]
        if self.attack is None or not any(bad):
            return list(results)
        before = {name: self.server.params[name] for name in self.names}
        rows = torch.stack([_row(result.shared, before) for result in results])
        clients = [result.client for result in results]
        rows = self.attack.changed(rows, clients, bad, self.settings.seed, self.server.round)
        return [
            replace(result, shared=result.shared | _from_row(row, before)) if is_bad else result
            for result, row, is_bad in zip(results, rows, bad, strict=True)
        ]


class RobustSums(UploadSums):
    """Robust aggregation. A sum is the robust mean of the clients' terms, times the number of clients.

    Private parameters (``private``) are not exchanged; their plain mean is used.
    """

    def __init__(self, mean: RobustMean, server: Server, private: Collection[str]) -> None:
        super().__init__(keeps_uploads=False)
        self.robust, self.server = mean, server
        self.shared = {k: w for k, w in server.params.items() if k not in private}
        self.private = set(server.params) - set(self.shared)
        self.rows: list[Tensor] = []
        self.others: list[Tensor] = []  # buffers and sums
        self.like: Tensors = {}  # of ``others``: their shapes
        self.clients: list[int] = []
        self.kept = torch.ones(0)

    def add(self, result: ClientResult) -> None:
        others = dict(leaves({"buffers": result.buffers, "sums": result.sums}))
        self.like = self.like or {path: torch.zeros_like(value) for path, value in others.items()}
        self.rows.append(_row(result.shared, self.shared))
        self.others.append(_row({path: others[path] for path in self.like}, self.like))
        self.clients.append(result.client)
        if self.private:
            own = {k: result.shared[k] * result.weight for k in self.private}
            self.params = {k: self.params[k] + v for k, v in own.items()} if self.params else own
        self.weight += result.weight
        self.bytes += size_in_bytes(result.sums)

    @property
    def usable(self) -> bool:
        return bool(self.rows)

    def mean(self) -> tuple[Tensors, Tensors]:
        """The robust means of parameters and buffers; ``sums`` become robust too."""
        self.robust.check(len(self.rows))
        order = sorted(range(len(self.rows)), key=lambda place: self.clients[place])
        self.clients = [self.clients[place] for place in order]
        rows, others = (
            torch.stack([values[place] for place in order]) for values in (self.rows, self.others)
        )
        weights = self.robust.weights(rows)
        self.kept = weights > 0
        change = _from_row(self.robust.estimate(rows, weights), self.shared)
        params = {
            k: (change[k] if k in change else self.params[k] / self.weight).contiguous()
            for k in self.server.params
        }
        estimated = self.robust.estimate(others, weights) if self.like else others.new_zeros(0)
        tree = unflatten(_from_row(estimated, self.like))
        self.sums = {} if "sums" not in tree else _times(tree["sums"], len(rows))
        return params, tree.get("buffers", {})

    def record(self) -> dict[str, Any]:
        """The clients that the robust mean excludes."""
        return {
            "rejected": [c for c, kept in zip(self.clients, self.kept.tolist(), strict=False) if not kept]
        }


def compressed(
    result: ClientResult,
    compression: Compression,
    before: Tensors,
    state: Tree | None,
    seed: int,
    round: int,
) -> tuple[ClientResult, Tensors]:
    """The result after compression and decompression, and the compressed upload.

    ``before`` are the exchanged parameters as broadcast; ``state`` is the client's state before the round. With error
    feedback, the client's new state contains the compression error.
    """
    row = _row(result.shared, before)
    kept = (state or {}).get("residual", {}).get("update")
    whole = row if kept is None else row + kept.to(row.device)
    sent = compression.encode(whole, seed, round, result.client)
    arrived = compression.decode(sent, len(row), row.dtype)
    new_state = result.client_state
    if compression.keeps_rest:
        new_state = new_state | {"residual": {"update": whole - arrived}}
    shared = result.shared | _from_row(arrived, before)
    return replace(result, shared=shared, client_state=new_state), sent


def received(sent: Tensors, compression: Compression, before: Tensors) -> Tensors:
    """Decompress a client's parameters; raises `HoldfastError` if ``sent`` is not a compressed upload."""
    row = _row(before, before)
    return _from_row(compression.decode(sent, len(row), row.dtype), before)


def _refused(result: ClientResult, norm: float, why: str) -> Incident:
    return Incident(result.client, LARGE_UPDATE, f"left out: norm {norm:.3g}, {why}")


def _row(values: Tensors, before: Tensors) -> Tensor:
    """The changes of all values as one vector."""
    parts = [(values[k] - b).flatten() for k, b in before.items()]
    return torch.cat(
        [part if part.is_floating_point() else part.float() for part in parts] or [torch.zeros(0)]
    )


def _from_row(row: Tensor, before: Tensors) -> Tensors:
    """The values after the change ``row``; inverse of `_row`. Counters are rounded."""
    parts = torch.split(row, [b.numel() for b in before.values()])
    return {
        k: b + (part if b.is_floating_point() else part.round()).to(b.dtype).view_as(b)
        for (k, b), part in zip(before.items(), parts, strict=True)
    }


def _times(tree: Tree, factor: float) -> Tree:
    return tree_map(lambda value: value * factor, tree)
