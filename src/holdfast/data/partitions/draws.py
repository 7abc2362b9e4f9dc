"""Rejection sampling of Dirichlet partitions: candidates are drawn in blocks, the first valid one is taken."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import counter_key
from holdfast.data.indexing import Floats, Ints

# Limit on the shares drawn in all candidates: about half a minute.
MAX_SHARES = 500_000_000
# Shares drawn at once on one core: enough to make NumPy's overhead negligible, in little memory.
SHARES_AT_ONCE = 1 << 19


def log_gammas(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Logarithms of Gamma(alpha) variates; for a small alpha the variates themselves underflow to 0.

    Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha).
    """
    logs: Floats = np.log(rng.standard_gamma(alpha + 1, shape))
    logs -= rng.standard_exponential(shape) / alpha
    return logs


def proportions(logs: Floats) -> Floats:
    """The softmax of ``logs`` along the last axis."""
    weights: Floats = np.exp(logs - logs.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def cut_points(shares: Floats, total: int) -> Floats:
    """The ends of the parts when ``total`` samples are split by these shares: floor(cumulative share * total)."""
    ends: Floats = np.cumsum(shares, axis=-1)
    ends *= total
    np.floor(ends, out=ends)
    # The last part takes the remainder, which rounding would lose.
    ends[..., -1] = total
    return ends


class Tables(NamedTuple):
    """Candidate partitions: the clients' sizes ``[n, clients]`` and the classes' cut points ``[C, n, clients]``."""

    sizes: Floats
    ends: Ints


def dirichlet_tables(
    alpha: float, class_sizes: Ints, clients: int, capped: bool, n: int, rng: np.random.Generator
) -> Tables:
    """``n`` independent candidates."""
    tables = Tables(np.zeros((n, clients)), np.zeros((len(class_sizes), n, clients), np.int64))
    equal_share = class_sizes.sum() / clients
    for c in np.flatnonzero(class_sizes):
        logs = log_gammas(alpha, (n, clients), rng)
        if capped:
            # While samples are left, some client has less than an equal share, so a row is never all -inf.
            logs[tables.sizes >= equal_share] = -np.inf
        ends = cut_points(proportions(logs), int(class_sizes[c]))
        tables.ends[c] = ends
        tables.sizes[:] += ends
        tables.sizes[:, 1:] -= ends[:, :-1]
    return tables


def dirichlet_counts(
    alpha: float, class_sizes: Ints, clients: int, min_size: int, capped: bool, rng: np.random.Generator
) -> Ints:
    """Samples per class and client ``[C, clients]`` of the first candidate whose clients all have ``min_size``.

    Candidates are drawn in blocks on all cores, each block from its own counter. The result has the distribution of
    rejection sampling one by one and does not depend on the number of cores.
    """
    seed, shares = int(rng.integers(1 << 63)), len(class_sizes) * clients
    most = max(1, SHARES_AT_ONCE // shares)

    def candidates(block: int) -> Tables:
        # SFC64 takes half the time of a counter-based generator for millions of variates.
        fast = np.random.Generator(np.random.SFC64(counter_key(seed, "candidates", block)))
        return dirichlet_tables(alpha, class_sizes, clients, capped, min(1 << block, most), fast)

    cores = min(os.cpu_count() or 1, most, 8)
    drawn, blocks, best = 0, 0, 0
    with ThreadPoolExecutor(cores) as threads:
        while drawn * shares < MAX_SHARES:
            for tables in threads.map(candidates, range(blocks, blocks + cores)):
                smallest = tables.sizes.min(-1)
                if smallest.max() >= min_size:
                    return np.diff(tables.ends[:, np.argmax(smallest >= min_size)], axis=-1, prepend=0)
                best = max(best, int(smallest.max()))
                drawn += len(smallest)
            blocks += cores
    raise HoldfastError(
        f"none of {drawn} draws gave every client {min_size} samples (the best gave {best}); use min_size={best} "
        "or less, fewer clients, or a larger alpha"
    )
