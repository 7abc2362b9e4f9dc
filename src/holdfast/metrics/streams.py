"""Accuracies of clients whose data arrive in stages (dynamic heterogeneous federated learning).

Classes and tasks that were not tested are NaN and are left out of the means.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray, agree, as_array, as_counts, divide, mean_measured


def seen_task_accuracy(task_accuracy: ArrayLike, test_sizes: ArrayLike, stage: int) -> float:
    """A_sel: accuracy of online clients' private models on all tasks they have trained on so far (B12).

    mean over clients k of  Σ_{j≤t} m[k, j] A[k, j] / Σ_{j≤t} m[k, j]

    Args:
        task_accuracy: [K, T], accuracy after stage t of each online client's private model on its own test
            samples of each task.
        test_sizes: [K, T], m, the number of those test samples; 0 where a client has no such task.
        stage: t, counting from 1.

    Returns:
        In [0, 1] for fractions; clients without a task so far are left out; NaN if no client has one.

    Source: FedMLP (Guo et al., AAAI 2024), A^sel, Fig. 4.
    """
    accuracy = as_array(task_accuracy, "task_accuracy", "K T")
    sizes = as_counts(test_sizes, "test_sizes", "K T")
    agree("K", task_accuracy=len(accuracy), test_sizes=len(sizes))
    agree("T", task_accuracy=accuracy.shape[1], test_sizes=sizes.shape[1])
    if not 1 <= stage <= accuracy.shape[1]:
        raise HoldfastError(f"stage must be from 1 to {accuracy.shape[1]}, not {stage}")
    accuracy, sizes = accuracy[:, :stage], sizes[:, :stage]
    correct = np.where(sizes > 0, sizes * accuracy, 0.0).sum(axis=1)
    return float(mean_measured(divide(correct, sizes.sum(axis=1))))


def local_stream_accuracy(
    class_accuracy: ArrayLike, minority: ArrayLike | None = None, last: int = 10
) -> float:
    """A_loc: mean accuracy of all clients' private models on the balanced test set (B13, B14).

    mean over the last epochs, the clients and the classes of A[e, k, c]

    Args:
        class_accuracy: [E, K, C], after each global epoch, of each client's private model.
        minority: [C], true for the classes to average over, which gives A_loc-t; None for all classes.
        last: how many epochs count, at most all.

    Returns:
        In [0, 1] for fractions; NaN without minority classes.

    Source: FedMLP, A^loc and A^loc-t, Tables 1-3.
    """
    accuracy = as_array(class_accuracy, "class_accuracy", "E K C")
    return _mean_of_last(mean_measured(_over_classes(accuracy, minority)), last)


def global_stream_accuracy(
    class_accuracy: ArrayLike, minority: ArrayLike | None = None, last: int = 10
) -> float:
    """A_glo: mean accuracy of the global model on the balanced test set (B13, B14).

    mean over the last epochs and the classes of A[e, c]

    Args:
        class_accuracy: [E, C], after each global epoch.
        minority: [C], true for the classes to average over, which gives A_glo-t; None for all classes.
        last: how many epochs count, at most all.

    Returns:
        In [0, 1] for fractions; NaN without minority classes.

    Source: FedMLP, A^glo and A^glo-t, Tables 1-3.
    """
    return _mean_of_last(_over_classes(as_array(class_accuracy, "class_accuracy", "E C"), minority), last)


def minority_accuracy(class_accuracy: ArrayLike, minority: ArrayLike) -> FloatArray:
    """Mean accuracy over the minority classes (B14).

    (1/|J|) Σ_{c∈J} A[c]

    Args:
        class_accuracy: [..., C].
        minority: [C], true for the classes in J; in the paper, the half of the classes with the fewest
            training samples over all clients.

    Returns:
        [...]; in [0, 1] for fractions; NaN without minority classes.

    Source: FedMLP, Table 3.
    """
    return _over_classes(as_array(class_accuracy, "class_accuracy", "... C"), minority)


def _over_classes(accuracy: FloatArray, minority: ArrayLike | None) -> FloatArray:
    if minority is None:
        return mean_measured(accuracy)
    chosen = as_array(minority, "minority", "C") != 0
    agree("C", class_accuracy=accuracy.shape[-1], minority=len(chosen))
    return mean_measured(accuracy[..., chosen])


def _mean_of_last(accuracy: FloatArray, last: int) -> float:
    if last < 1:
        raise HoldfastError(f"last must be at least 1, not {last}")
    return float(mean_measured(accuracy[-last:]))
