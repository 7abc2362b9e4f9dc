"""The round with the best model on the clients' validation samples, and early stopping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.core.measures import Measure
from holdfast.core.trees import Tensors, clone
from holdfast.runs.tensors import State

PARAMS, BUFFERS = "best/params/", "best/buffers/"  # in a checkpoint

Model = tuple[Tensors, Tensors]
"""Parameters and buffers."""


class BestRound:
    """The first round with the best validation metric, its model, and the validated rounds since.

    Everything except the model is derived from the records, so that a resumed run stops in the same round.
    """

    def __init__(self, measure: Measure, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.measure = measure
        self.round: int | None = None
        self.value = float("-inf")  # more is better
        self.waited = 0
        self.model: Model = ({}, {})
        for record in records:
            self.add(record)

    def stops(self, record: Mapping[str, Any], patience: int | None) -> bool:
        """Whether the run ends with this record, because ``patience`` validated rounds gave no better model."""
        if patience is None or "validation" not in record:
            return False
        return not self._value(record) > self.value and self.waited + 1 >= patience

    def add(self, record: Mapping[str, Any]) -> bool:
        """Add the next round's record; returns whether it is the best so far."""
        if "validation" not in record:
            return False
        value = self._value(record)
        if not value > self.value:
            self.waited += 1
            return False
        self.round, self.value, self.waited = int(record["round"]), value, 0
        return True

    def _value(self, record: Mapping[str, Any]) -> float:
        """The metric by which rounds are compared; NaN, which is never better, if it is not defined."""
        found = record["validation"].get(self.measure.name)
        return float("nan") if found is None else self.measure.sign * float(found)

    def keep(self, model: Model) -> None:
        """Keep a copy of the best round's model."""
        self.model = (clone(model[0]), clone(model[1]))

    def state(self) -> State:
        """The tensors to save in checkpoints."""
        params, buffers = self.model
        return {f"{PARAMS}{k}": v.cpu() for k, v in params.items()} | {
            f"{BUFFERS}{k}": v.cpu() for k, v in buffers.items()
        }

    def restore(self, state: State, device: torch.device) -> None:
        """Restore what ``state`` returned, from all tensors of a checkpoint."""
        self.model = (_under(PARAMS, state, device), _under(BUFFERS, state, device))


def _under(prefix: str, state: State, device: torch.device) -> Tensors:
    return {name.removeprefix(prefix): v.to(device) for name, v in state.items() if name.startswith(prefix)}
