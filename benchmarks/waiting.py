"""A method whose clients wait instead of computing, on workers of given speeds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray

import holdfast as hf


@dataclass(frozen=True)
class Waits(hf.FedAvg):
    """FedAvg whose clients wait before they train, the longer the slower their worker's node is."""

    seconds_per_sample: float = 0.0
    speeds: str = ""  # node=speed, separated by commas

    def client_init(self, payload: Any, state: Any, client: Any) -> Any:
        speeds = dict(pair.split("=") for pair in self.speeds.split(","))
        speed = float(speeds[ray.get_runtime_context().get_node_id()])
        time.sleep(client.samples * self.seconds_per_sample / speed)
        return super().client_init(payload, state, client)
