"""Agreement of two models' units on the classes to which they respond, a condition for averaging weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray, agree, as_array, as_labels


def neuron_alignment(activations_a: ArrayLike, activations_b: ArrayLike, labels: ArrayLike) -> float:
    """The share of a layer's units that prefer the same class in two models (B10).

    preference[j] = argmax_c mean activation of unit j over samples of class c;
    alignment = (1/D) Σ_j [preference_a[j] = preference_b[j]]

    Ties go to the lowest class, so units dead in both models count as aligned: report `dead_unit_share` too.

    Args:
        activations_a: [N, D], one layer of the first model after ReLU, on N test samples.
        activations_b: [N, D], the same layer of the second model on the same samples.
        labels: [N], class of each sample, counting from 0.

    Returns:
        In [0, 1].

    Source: FedNTD (Lee et al., NeurIPS 2022) section 5.1, Table 2.
    """
    first = as_array(activations_a, "activations_a", "N D")
    second = as_array(activations_b, "activations_b", "N D")
    classes = as_labels(labels, "labels")
    agree("N", activations_a=len(first), activations_b=len(second), labels=len(classes))
    agree("D", activations_a=first.shape[1], activations_b=second.shape[1])
    if not first.size:
        raise HoldfastError("activations must hold at least 1 sample and 1 unit")
    return float(np.mean(_preference(first, classes) == _preference(second, classes)))


def dead_unit_share(activations: ArrayLike) -> float:
    """The share of a layer's units that no sample activates (B10).

    (1/D) Σ_j [ max_n activation[n, j] ≤ 0 ]

    Args:
        activations: [N, D], one layer after ReLU, on N test samples.

    Returns:
        In [0, 1].

    Source: a caution to read with `neuron_alignment`, FedNTD Table 2.
    """
    array = as_array(activations, "activations", "N D")
    if not array.size:
        raise HoldfastError("activations must hold at least 1 sample and 1 unit")
    return float(np.mean(array.max(axis=0) <= 0))


def _preference(activations: FloatArray, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The preferred class of each unit, [D], as an index into the classes that occur in ``labels``."""
    means = [activations[labels == c].mean(axis=0) for c in np.unique(labels)]
    return np.asarray(np.argmax(means, axis=0))
