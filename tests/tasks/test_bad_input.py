"""Bad targets, metrics and settings: one clear sentence before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast as hf

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
BINARY, FRACTIONS = RNG.integers(0, 2, 60), RNG.normal(size=60)
TIMES = np.stack([RNG.random(60), BINARY], 1)


def train(
    y: np.ndarray, task: str | None = None, y_test: np.ndarray | None = None, **settings: Any
) -> hf.Run:
    data = hf.Dataset.from_arrays(X, y, X[:30], y[:30] if y_test is None else y_test, task=task)
    federation = hf.federate(data, "iid", clients=settings.pop("clients", 3))
    return hf.train("fedavg", "linear", federation, rounds=1, progress=False, **settings)


TARGETS = {
    ("binary", "y_train holds 2; the targets of task 'binary' must be 0 or 1"): BINARY * 2,
    ("binary", "the targets of task 'binary' must be 0 or 1"): FRACTIONS,
    (
        "multiclass",
        "must hold whole numbers, one class each; other numbers need task='regression'",
    ): FRACTIONS,
    ("multiclass", "they must be from 0"): BINARY - 1,
    ("multilabel", "a column of 0 and 1 for each label, shape [60, labels], not [60]"): BINARY,
    ("multilabel", "y_train holds 2; the targets of task 'multilabel' must be 0 or 1"): np.stack(
        [BINARY] * 2, 1
    )
    * 2,
    ("counts", "y_train holds -1; the targets of task 'counts' must be 0 or more"): BINARY - 1,
    ("counts", "must hold whole numbers, one count each"): FRACTIONS,
    ("survival", "time and event (1 observed, 0 censored) of each sample, shape [60, 2], not [60]"): BINARY,
    ("survival", "survival times must be 0 or more"): TIMES - 1.5,
    ("survival", "holds the event 2; it must be 1 (observed) or 0 (censored)"): TIMES * [1, 2],
    ("regression", "NaN or infinite values in"): np.where(BINARY == 1, np.nan, 0.5),
    ("regression", "it contains strings or other objects"): np.array(["a"] * 60),
    ("sequence", "a label for each position, shape [60, length], not [60]"): BINARY,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "unknown task 'bnary'; did you mean binary?": {"task": "bnary"},
    "unknown metric of task 'binary' 'rmse'; known: accuracy, auprc, auroc": {"metrics": ["rmse"]},
    "unknown metric of task 'binary' 'aurroc'; did you mean auroc": {"metrics": "aurroc"},
    "auroc cannot be measured on this test set: it needs samples of two classes": {
        "metrics": ["auroc"], "y_test": np.zeros(30, int)},
    "such as client 0, have a single sample, which cannot be used for both training and validation": {
        "clients": 60, "validation": 0.1},
    "validation is 1.0; it must be above 0 and below 1": {"validation": 1.0},
    "patience is 2, but no client has validation samples": {"patience": 2},
    "unknown optimizer 'adan'; did you mean adam": {"optimizer": "adan"},
    "unknown option of adam 'beta'; did you mean betas?": {"optimizer": "adam:beta=0.9"},
    "adam: eps is -1.0; it must be at least 0": {"optimizer": "adam:eps=-1"},
    "unknown lr_schedule 'cosin'; did you mean cosine?": {"lr_schedule": "cosin"},
    "unknown option of cosine 'gamma'; known: final, over, warmup": {"lr_schedule": "cosine:gamma=0.1"},
    "cosine: over is 'epochs'; it must be rounds or steps": {"lr_schedule": "cosine:over=epochs"},
}  # fmt: skip


def refused(sentence: str, call: Callable[..., hf.Run], *args: Any, **settings: Any) -> None:
    rounds: list[Any] = []
    with pytest.raises(hf.HoldfastError) as raised:
        call(*args, on_round=rounds.append, **settings)
    assert sentence in str(raised.value)
    assert not rounds


@pytest.mark.parametrize(("task", "sentence"), TARGETS)
def test_targets_of_the_wrong_kind(task: str, sentence: str) -> None:
    refused(sentence, train, TARGETS[task, sentence], task)


@pytest.mark.parametrize("sentence", SETTINGS)
def test_settings(sentence: str) -> None:
    refused(sentence, train, BINARY, **{"task": "binary"} | SETTINGS[sentence])


def test_a_test_set_of_one_class_is_named_and_auroc_left_out() -> None:
    with pytest.warns(
        hf.HoldfastWarning, match="auroc cannot be measured .* needs samples of two classes; it is left"
    ):
        run = train(BINARY, "binary", np.zeros(30, int))
    record = run.records[-1]
    assert "auroc" not in record
    assert 0 <= record["accuracy"] <= 1
    assert run.primary.name == "accuracy"
    assert np.isnan(record["distribution_distance"]).all()  # of label distributions over one tested class
