"""Run directories shared by the tests of this folder."""

import pytest
from synthetic_runs import write_run


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Three methods, two seeds each."""
    root = tmp_path_factory.mktemp("compared")
    return [
        write_run(root / f"{method}-{seed}", method, keeps=keeps, seed=seed, rounds=24)
        for method, keeps in (("fedavg", 0.25), ("fedntd", 0.6), ("flashback", 0.8))
        for seed in range(2)
    ]


@pytest.fixture(scope="session")
def streamed(tmp_path_factory):
    """Two methods on a stream with domains, two seeds each."""
    root = tmp_path_factory.mktemp("streamed")
    return [
        write_run(
            root / f"{method}-{seed}", method, keeps=keeps, seed=seed, rounds=30, stream=True, domains=True
        )
        for method, keeps in (("fedavg", 0.3), ("fedmlp", 0.7))
        for seed in range(2)
    ]
