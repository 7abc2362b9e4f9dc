"""Drawing the tables behind Dirichlet partitions: many candidates side by side, the first that will do."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import counter_key
from holdfast.data.dealing import Floats, Ints

# Redraws stop after this many random shares in all: about half a minute.
MOST_SHARES = 500_000_000
# Shares drawn at once on one core: enough to drown NumPy's overhead, little memory.
SHARES_AT_ONCE = 1 << 19


def log_gammas(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Logarithms of Gamma(alpha) variates, since for a small alpha the variates themselves become 0.

    Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha).
    """
    logs: Floats = np.log(rng.standard_gamma(alpha + 1, shape))
    logs -= rng.standard_exponential(shape) / alpha
    return logs


def proportions(logs: Floats) -> Floats:
    """Numbers that add up to 1 along the last axis and have these logarithms, up to a factor."""
    weights: Floats = np.exp(logs - logs.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def cut(shares: Floats, total: int) -> Floats:
    """Where a list of ``total`` samples is cut by these shares: floor(cumulative share * total)."""
    ends: Floats = np.cumsum(shares, axis=-1)
    ends *= total
    np.floor(ends, out=ends)
    # The last share takes what is left, which rounding would lose.
    ends[..., -1] = total
    return ends


class Tables(NamedTuple):
    """Candidate partitions: clients' sizes ``[n, clients]`` and where classes are cut ``[C, n, clients]``."""

    sizes: Floats
    ends: Ints


def dirichlet_tables(
    alpha: float, class_sizes: Ints, clients: int, capped: bool, n: int, rng: np.random.Generator
) -> Tables:
    """``n`` independent candidates, drawn side by side."""
    tables = Tables(np.zeros((n, clients)), np.zeros((len(class_sizes), n, clients), np.int64))
    fair_share = class_sizes.sum() / clients
    for c in np.flatnonzero(class_sizes):
        logs = log_gammas(alpha, (n, clients), rng)
        if capped:
            # While samples are left somebody holds less than a fair share, so a row is never all -inf.
            logs[tables.sizes >= fair_share] = -np.inf
        ends = cut(proportions(logs), int(class_sizes[c]))
        tables.ends[c] = ends
        tables.sizes[:] += ends
        tables.sizes[:, 1:] -= ends[:, :-1]
    return tables


def dirichlet_counts(
    alpha: float, class_sizes: Ints, clients: int, min_size: int, capped: bool, rng: np.random.Generator
) -> Ints:
    """Samples per class and client ``[C, clients]`` of the first candidate with ``min_size`` for everybody.

    Candidates are drawn in blocks, side by side and on every core, each block from a counter of its own. That
    has the law of drawing one after another until one is right, and does not depend on the number of cores.
    """
    seed, shares = int(rng.integers(1 << 63)), len(class_sizes) * clients
    most = max(1, SHARES_AT_ONCE // shares)

    def candidates(block: int) -> Tables:
        # SFC64 draws millions of variates in half the time that counters themselves would take.
        fast = np.random.Generator(np.random.SFC64(counter_key(seed, "candidates", block)))
        return dirichlet_tables(alpha, class_sizes, clients, capped, min(1 << block, most), fast)

    cores = min(os.cpu_count() or 1, most, 8)
    drawn, blocks, best = 0, 0, 0
    with ThreadPoolExecutor(cores) as threads:
        while drawn * shares < MOST_SHARES:
            for tables in threads.map(candidates, range(blocks, blocks + cores)):
                smallest = tables.sizes.min(-1)
                if smallest.max() >= min_size:
                    return np.diff(tables.ends[:, np.argmax(smallest >= min_size)], axis=-1, prepend=0)
                best = max(best, int(smallest.max()))
                drawn += len(smallest)
            blocks += cores
    raise HoldfastError(
        f"none of {drawn} draws gave every client {min_size} samples (the best gave {best}); take "
        f"min_size={best} or less, fewer clients, or a larger alpha"
    )
