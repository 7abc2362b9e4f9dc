"""Counter-based random numbers, without a global generator.

Every random choice of a run is a function of (run seed, purpose, counters such as round, client, epoch).
It therefore does not depend on the order, the engine or the process in which clients run.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

_MASK = (1 << 64) - 1


@lru_cache
def _purpose_key(purpose: str) -> int:
    return int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """One step of splitmix64: a bijection of 64-bit integers in which every input bit moves every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def counter_key(seed: int, purpose: str, *counters: int) -> int:
    """A 64-bit key for one choice: the same arguments give the same key on every machine."""
    key = _mix(_purpose_key(purpose) ^ _mix(seed & _MASK))
    for counter in counters:
        key = _mix(key ^ _mix(counter & _MASK))
    return key


def counter_keys(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What `counter_key` returns with one more counter, for many keys: ``[N]``."""
    return _mix_all(keys ^ _mix_all(counters.astype(np.uint64)))


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _Key(ISeedSequence):
    """A generator's key. With Philox's ``key`` argument, NumPy would also draw an unused seed from the system."""

    def __init__(self, key: int) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> np.ndarray:
        """The key in Philox's format: two words of 64 bits."""
        return np.array([self.key, 0], np.uint64)


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A separate NumPy generator for one choice, e.g. ``generator(seed, "batches", round, client, epoch)``."""
    key = _Key(counter_key(seed, purpose, *counters))
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # any ISeedSequence is accepted
