"""Runs that learn nothing, or diverge: the sentence, and the statistics behind it."""

import math
import warnings

import numpy as np
import pytest
from scipy.stats import binomtest

import holdfast as hf
from holdfast.training.outcome import failure

BALANCED = np.full(10, 36)


def records(accuracy, train_loss, loss=1.0):
    return [
        {
            "round": n,
            "accuracy": accuracy,
            "class_accuracy": [accuracy] * 10,
            "loss": loss,
            "train_loss": value,
        }
        for n, value in enumerate(train_loss, start=1)
    ]


@pytest.mark.parametrize("counts", [BALANCED, np.array([90, 5, 5]), np.array([3, 3, 3])])
def test_chance_is_what_a_binomial_test_does_not_reject(counts):
    samples, chance = counts.sum(), counts.max() / counts.sum()
    judged = [
        failure(records(correct / samples, [2.0] * 6), counts, 0.1) is not None
        for correct in range(samples + 1)
    ]
    wanted = [
        binomtest(correct, samples, chance, alternative="greater").pvalue >= 0.01
        for correct in range(samples + 1)
    ]
    assert judged == wanted


def test_the_largest_class_is_the_measure_where_classes_are_unequal():
    counts = np.array([95, 5])
    assert "95.0% of the test samples" in failure(records(0.95, [0.3] * 6), counts, 0.1)
    assert failure(records(0.95, [0.3] * 6), np.array([50, 50]), 0.1) is None


def test_what_to_try_depends_on_the_loss():
    slow = failure(records(0.1, [2.3] * 6), BALANCED, 1e-4)
    assert "larger lr than 0.0001" in slow
    assert "more rounds" in slow
    exploded = failure(records(0.1, [1e20, 5, 3, 2, 2, 2]), BALANCED, 3)
    assert "smaller lr than 3" in exploded


def test_a_rising_loss_is_divergence_only_where_the_test_loss_is_worse_than_guessing():
    rising = [1.0, 1.2, 1.1, 1.5, 2.0, 2.5, 3.0]
    assert "rose from 1 to 3 over 7 rounds" in failure(
        records(0.5, rising, math.log(10) + 0.1), BALANCED, 0.1
    )
    assert failure(records(0.5, rising, math.log(10) - 0.1), BALANCED, 0.1) is None
    assert failure(records(0.5, rising[::-1], math.log(10) + 0.1), BALANCED, 0.1) is None
    for bad in (None, math.nan, math.inf):
        assert "not a finite number" in failure(records(0.5, rising, bad), BALANCED, 0.1)


def test_a_short_run_is_judged_only_where_its_loss_exploded():
    slow, exploded = [2.3] * 3, [1e5, 3.0, 2.3]
    assert failure(records(0.1, slow), BALANCED, 0.1) is None
    assert "after 3 rounds" in failure(records(0.1, exploded), BALANCED, 1000)
    assert failure(records(0.5, exploded), BALANCED, 1000) is None
    assert "not a finite number after 1 round;" in failure(records(0.1, [1.0], math.nan), BALANCED, 1000)


def test_no_judgement_without_rounds_tests_or_a_global_model():
    assert failure(records(0.1, [2.3] * 4), BALANCED, 0.1) is None
    untested = [{"round": n, "train_loss": 2.3} for n in range(1, 9)]
    assert failure(untested, BALANCED, 0.1) is None
    assert failure(records(0.1, [2.3] * 9), BALANCED, 0.1, judge_accuracy=False) is None


@pytest.fixture(scope="module")
def federation():
    return hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.1), clients=5, seed=0)


@pytest.mark.parametrize(
    ("lr", "said"), [(1e-5, "larger lr than 1e-05"), (50.0, "smaller lr than 50"), (0.1, None)]
)
def test_training_warns(federation, lr, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.train("fedavg", "mlp:16", federation, rounds=6, local_epochs=2, lr=lr, evaluate_locals=False)
    told = [str(w.message) for w in caught if issubclass(w.category, hf.HoldfastWarning)]
    assert [said in sentence for sentence in told] == ([] if said is None else [True])
    assert all(w.filename == __file__ for w in caught if issubclass(w.category, hf.HoldfastWarning))


def test_a_by_product_is_not_judged(federation):
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf.HoldfastWarning)
        hf.train("fedrep", "mlp:16", federation, rounds=6, local_epochs=2, lr=1e-5, evaluate_locals=False)
