"""Federated evaluation: every client's metrics of the global model and of its own, counted again in NumPy."""

import math
import warnings

import numpy as np
import pytest
from scipy.stats import rankdata

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data.validation import hold_out

SIZES = [30, 44, 17, 61, 25]
SETTINGS = {
    "rounds": 3, "lr": 0.1, "batch_size": 8, "device": "cpu", "precision": "float64", "progress": False,
    "validation": 0.3, "evaluate_locals": False, "local_epochs": 2,
}  # fmt: skip
CLIENTS = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def federation(task="multiclass", all_ones=()):
    """Five clients; in a binary task those of ``all_ones`` have the second class alone."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(sum(SIZES), 4)).round(2)
    number = x @ [1.0, -2.0, 0.5, 0.0] + rng.normal(size=len(x))
    y = {
        "multiclass": np.digitize(number, [-1, 1]),
        "binary": number > 0.4,
        "regression": number,
        "counts": np.floor(np.abs(number)),
        "survival": np.stack([np.exp(-number / 2).round(1), rng.random(len(x)) < 0.6], 1),
    }[task]
    for k in all_ones:
        y[CLIENTS[k]] = True
    data = hf.Dataset.from_arrays(x, y.astype(float), x[:40], y[:40].astype(float), task=task)
    return hf.federate(data, CLIENTS)


def outputs(given, run):
    """The targets of each client's validation samples, and the global model's outputs for them."""
    held = hold_out(given, SETTINGS["validation"], 0)
    weight, bias = (value.double().numpy() for value in run.model.state_dict().values())
    for k in range(given.clients):
        ids = held.validation[held.validation_offsets[k] : held.validation_offsets[k + 1]]
        x, y = given.dataset.x_train[ids].double().numpy(), given.dataset.y_train[ids].double().numpy()
        yield y, x @ weight.T + bias


def check(found, name, expected, less_is_better=False):
    sizes, expected = np.array([round(0.3 * n) for n in SIZES]), np.array(expected)
    assert found["samples"] == sizes.tolist()
    assert found["clients"] == [0, 1, 2, 3, 4]
    values = np.array([math.nan if v is None else v for v in found["values"][name]])
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    known = ~np.isnan(expected)
    assert found[name] == pytest.approx(np.average(expected[known], weights=sizes[known]))
    assert found["site_mean"][name] == pytest.approx(expected[known].mean())
    assert found["spread"][name] == pytest.approx(expected[known].std(ddof=1))
    worst = int((np.nanargmax if less_is_better else np.nanargmin)(expected))
    assert found["worst"][name] == pytest.approx(expected[worst])
    assert found["worst_client"][name] == worst


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_classes(engine):
    given = federation()
    run = hf.train("fedavg", "linear", given, engine=engine, **SETTINGS)
    accuracy, losses = [], []
    for y, z in outputs(given, run):
        y = y.astype(int)
        accuracy.append((z.argmax(1) == y).mean())
        losses.append((np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean())
    check(run.records[-1]["validation"], "accuracy", accuracy)
    check(run.records[-1]["validation"], "loss", losses, less_is_better=True)
    assert run.validation()[-1] == run.records[-1]["validation"]["accuracy"]
    assert run.validation("loss").tolist() == [record["validation"]["loss"] for record in run.records]
    with pytest.raises(HoldfastError, match="unknown validation metric of this run 'auroc'"):
        run.validation("auroc")


def test_a_client_with_one_class_has_no_auroc():
    given = federation("binary", all_ones=[2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = hf.train("fedavg", "linear", given, metrics=["auroc", "accuracy"], **SETTINGS)
    text = " ".join(str(one.message) for one in caught)
    assert "auroc cannot be measured on the validation samples of 1 of 5 clients (client 2)" in text
    areas = []
    for y, z in outputs(given, run):
        ranks, positives = rankdata(z[:, 0]), int(y.sum())
        pairs = positives * (len(y) - positives)
        areas.append((ranks[y > 0].sum() - positives * (positives + 1) / 2) / pairs if pairs else math.nan)
    check(run.records[-1]["validation"], "auroc", areas)


def test_a_metric_that_no_client_defines_is_refused_or_left_out():
    given = federation("binary", all_ones=range(5))
    given.dataset.y_test[:20] = 0  # the test set defines it
    with pytest.raises(
        HoldfastError, match="auroc cannot be measured on the validation samples of any client"
    ):
        hf.train("fedavg", "linear", given, **SETTINGS)
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.raises(HoldfastError, match="auroc cannot be measured"),
    ):
        hf.train("fedavg", "linear", given, metrics=["accuracy", "auroc"], **SETTINGS)
    assert not caught


@pytest.mark.parametrize("task", ["regression", "counts"])
def test_numbers(task):
    given = federation(task)
    run = hf.train("fedavg", "linear", given, **SETTINGS | {"lr": 0.02})
    pairs = [(y, z[:, 0] if task == "regression" else np.exp(z[:, 0])) for y, z in outputs(given, run)]
    found = run.records[-1]["validation"]
    check(found, "mae", [np.abs(y - z).mean() for y, z in pairs], less_is_better=True)
    check(found, "rmse", [np.sqrt(((y - z) ** 2).mean()) for y, z in pairs], less_is_better=True)
    if task == "regression":
        check(found, "r2", [1 - ((y - z) ** 2).sum() / ((y - y.mean()) ** 2).sum() for y, z in pairs])
    else:
        losses = [(np.exp(z[:, 0]) - y * z[:, 0]).mean() for y, z in outputs(given, run)]
        check(found, "loss", losses, less_is_better=True)


def test_survival_compares_a_clients_own_samples_alone():
    given = federation("survival")
    run = hf.train("fedavg", "linear", given, **SETTINGS)
    shares, losses = [], []
    for (time, event), risk in ((y.T, z[:, 0]) for y, z in outputs(given, run)):
        right = pairs = 0.0
        for i in np.flatnonzero(event):
            for j in range(len(time)):
                if time[i] < time[j] or (time[i] == time[j] and not event[j]):
                    pairs += 1
                    right += (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
        shares.append(right / pairs)
        at_risk = [np.log(np.exp(risk[time >= t]).sum()) for t in time]
        losses.append((event * (at_risk - risk)).mean())
    check(run.records[-1]["validation"], "concordance", shares)
    check(run.records[-1]["validation"], "loss", losses, less_is_better=True)


def test_positions():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 5, (sum(SIZES), 7))
    y = np.roll(x, -1, 1)
    y[:, -1] = -100
    y[::3, 2:] = -100  # sequences of different lengths
    data = hf.Dataset.from_arrays(x, y, x[:20], y[:20], task="sequence")
    given = hf.federate(data, CLIENTS)
    run = hf.train("fedavg", "char-lstm:width=8,layers=1,embedding=4", given, **SETTINGS)
    held, found = hold_out(given, 0.3, 0), run.records[-1]["validation"]
    perplexity, accuracy = [], []
    for k in range(5):
        ids = held.validation[held.validation_offsets[k] : held.validation_offsets[k + 1]]
        logits = run.model(given.dataset.x_train[ids]).detach().double().numpy()
        real = y[ids] >= 0
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        perplexity.append(
            np.exp(-np.take_along_axis(log_p, y[ids].clip(0)[..., None], -1)[..., 0][real].mean())
        )
        accuracy.append((logits.argmax(-1) == y[ids])[real].mean())
    check(found, "perplexity", perplexity, less_is_better=True)
    check(found, "accuracy", accuracy)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", ["fedavg", "fedrod", "ditto"])
def test_each_participant_tests_its_own_model(engine, method, monkeypatch):
    """The record holds, for each participant, what a test of its model on its own samples alone gives."""
    from holdfast.engine.local_records import LocalRecords

    given, expected = federation(), {}
    held, add = hold_out(given, 0.3, 0), LocalRecords.add

    def spy(self, result, server):
        ids = held.validation[
            held.validation_offsets[result.client] : held.validation_offsets[result.client + 1]
        ]
        x, network = given.dataset.x_train[ids].double(), self.loop.context.network
        params = {name: value.clone() for name, value in result.params.items()}
        out = network.clone().to(x.device, x.dtype).apply(params, {}, x)
        logits = self.loop.method.personal_logits(out, result.client_state.get("method", {}))
        expected[server.round, result.client] = float(
            (logits.argmax(1) == given.dataset.y_train[ids]).double().mean()
        )
        add(self, result, server)

    monkeypatch.setattr(LocalRecords, "add", spy)
    settings = SETTINGS | {"rounds": 2, "clients_per_round": 3}
    for record in hf.train(method, "mlp:8", given, engine=engine, **settings).records:
        found = record["local_validation"]
        assert found["clients"] == record["participants"]
        assert found["values"]["accuracy"] == [expected[record["round"], k] for k in found["clients"]]
        assert record["validation"]["clients"] == [0, 1, 2, 3, 4]


def test_a_run_without_validation_records_none_and_rounds_without_a_test_neither():
    settings = SETTINGS | {"evaluate_every": 2}
    with_it = hf.train("fedavg", "linear", federation(), **settings).records
    assert ["validation" in record for record in with_it] == [False, True, True]
    assert ["local_validation" in record for record in with_it] == [False, True, True]
    without = hf.train("fedavg", "linear", federation(), **settings | {"validation": None}).records
    assert not any("validation" in key for record in without for key in record)


def test_a_share_that_leaves_a_client_without_data_is_refused_before_training():
    data = federation().dataset
    small = hf.federate(data, [[0, 1, 2], [3]])
    with pytest.raises(HoldfastError, match="client 1 has a single sample, which cannot be used for both"):
        hf.train("fedavg", "linear", small, **SETTINGS)
    with pytest.raises(HoldfastError, match=r"validation is 1\.0; it must be above 0 and below 1"):
        hf.train("fedavg", "linear", small, **SETTINGS | {"validation": 1})


def test_given_validation_data_are_used_and_exclude_a_share():
    given = federation()
    held = hold_out(given, 0.3, 0)
    own = given.holding_out(held.validation)
    drawn = hf.train("fedavg", "linear", given, **SETTINGS).records
    used = hf.train("fedavg", "linear", own, **SETTINGS | {"validation": None}).records
    assert [r["validation"] for r in used] == [r["validation"] for r in drawn]
    with pytest.raises(HoldfastError, match="clients already have validation data"):
        hf.train("fedavg", "linear", own, **SETTINGS)


def test_protection_of_updates_does_not_cover_the_metrics():
    with pytest.warns(hf.HoldfastWarning, match="without noise; secure protects only the updates"):
        hf.train("fedavg", "linear", federation(), **SETTINGS | {"rounds": 1, "secure": "secagg+"})
