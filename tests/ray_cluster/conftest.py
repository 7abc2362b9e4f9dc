"""A real Ray cluster of two nodes on this machine, each with one CPU; its processes end with the tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

# A token of its own, as docs/cluster.md asks for, whatever the machine's user has; Ray reads it when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    memory = {"num_cpus": 1, "object_store_memory": 100 << 20}
    both = Cluster(initialize_head=True, head_node_args=memory | {"include_dashboard": False})
    both.add_node(**memory)
    both.wait_for_nodes()
    yield both
    ray.shutdown()
    both.shutdown()
