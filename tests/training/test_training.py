"""The Python interface: what a user's ten lines do, and what they are told when something is wrong."""

import json
import shutil
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Thread
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.engine.rounds import RoundLoop
from holdfast.runs import RunDirectory
from holdfast.training.session import Training

DIGITS = hf.load("digits")
SMALL = {"rounds": 3, "clients_per_round": 4, "local_epochs": 1, "batch_size": 32, "lr": 0.1, "device": "cpu"}


@pytest.fixture(scope="module")
def federation():
    return hf.federate(DIGITS, hf.Dirichlet(alpha=0.3), clients=8, seed=0)


def test_ten_lines(federation):
    run = hf.train(hf.FedNTD(beta=1.0), hf.models.cnn(), federation, momentum=0.9, seed=0, **SMALL)
    assert 0 < run.accuracy <= 1
    assert run.class_accuracy.shape == (3, 10)
    assert isinstance(run.model, nn.Module)
    with torch.no_grad():
        predicted = run.model(DIGITS.preprocess(DIGITS.x_test)).argmax(1)
    assert float((predicted == DIGITS.y_test).float().mean()) == pytest.approx(run.accuracy)
    for label in range(10):
        ours = (predicted[DIGITS.y_test == label] == label).float().mean()
        assert float(ours) == pytest.approx(run.class_accuracy[-1, label])


def test_methods_and_models_may_be_written_as_on_the_command_line(federation):
    made, written = (
        hf.train(method, model, federation, **SMALL)
        for method, model in ((hf.FedProx(mu=0.5), hf.models.mlp(8)), ("fedprox:mu=0.5", "mlp:8"))
    )
    for one, other in zip(made.model.parameters(), written.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(hf.HoldfastError, match="did you mean fedprox"):
        hf.train("fedproxx", "linear", federation, **SMALL)


def test_a_run_tells_itself_in_one_line(federation, tmp_path):
    run = hf.train("fedntd", "linear", federation, rounds=2, out=tmp_path / "run")
    right = f"Run(fedntd, 2 rounds, accuracy {100 * run.records[-1]['accuracy']:.2f}%"
    assert repr(run) == repr(hf.Run.open(tmp_path / "run")) == f"{right}, in '{tmp_path / 'run'}')"
    assert repr(hf.train("fedntd", "linear", federation, rounds=2)) == f"{right})"


def test_forgetting_is_best_minus_final(federation):
    run = hf.train(hf.FedAvg(), hf.models.linear(), federation, **SMALL | {"rounds": 6})
    by_class = run.class_accuracy
    assert run.forgetting == pytest.approx((by_class[:-1].max(0) - by_class[-1]).mean())
    overall = [record["accuracy"] for record in run.records]
    assert run.rounds_to(overall[2]) == 1 + min(i for i, a in enumerate(overall) if a >= overall[2])
    assert run.rounds_to(1.1) is None


def test_accuracy_is_told_by_domain_wherever_it_is_told_by_class(tmp_path):
    skew = hf.FeatureSkew(rotation=60, groups=2)
    federation = hf.federate(DIGITS, hf.IID(), clients=8, skew=skew)
    run = hf.train(hf.FedAvg(), hf.models.linear(), federation, out=tmp_path / "run", **SMALL)
    assert list(run.domain_accuracy) == ["skew 0", "skew 1"]
    domain = federation.dataset.groups["domain"].test
    shares = np.bincount(domain) / len(domain)
    by_domain = [run.domain_accuracy[name][-1] for name in ("skew 0", "skew 1")]
    assert np.dot(shares, by_domain) == pytest.approx(run.accuracy)
    local = run.records[-1]["locals"]
    assert {len(values) for values in local["domain_accuracy"].values()} == {len(local["accuracy"])}
    stored = json.loads((tmp_path / "run" / "federation.json").read_text())["domains"]
    assert stored == {"names": ["skew 0", "skew 1"], "clients": [0, 1] * 4}


def test_what_clients_forget_is_told_of_the_model_they_were_sent_however_seldom_it_is_tested(federation):
    often, seldom = (
        hf.train(
            hf.FedAvg(), hf.models.linear(), federation, evaluate_every=every, local_test_samples=60, **SMALL
        )
        for every in (1, 2)
    )
    for each, record in zip(often.records, seldom.records, strict=True):
        told = record["locals"]
        assert told["class_accuracy"] == each["locals"]["class_accuracy"]  # the same training
        sent, trained = np.array(told["global_before"]), np.array(told["class_accuracy"])
        assert record["local_forgetting"] == pytest.approx((sent - trained).clip(0).mean(axis=1))
        for key in ("local_forgetting", "distribution_distance", "in_local", "out_local"):
            assert record[key] == pytest.approx(each[key])
    for before, record in pairwise(often.records):  # both on the samples that local models are tested on
        assert record["locals"]["global_before"] == before["locals"]["global_after"]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_same_seed_same_bits_and_another_seed_others(federation, engine):
    weights = [
        hf.train(
            hf.FedAvg(), hf.models.mlp(16), federation, seed=seed, engine=engine, **SMALL
        ).model.state_dict()
        for seed in (1, 1, 2)
    ]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert not all(torch.equal(weights[0][k], weights[2][k]) for k in weights[0])


def test_own_arrays_own_clients_own_model(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    x = rng.normal(size=(300, 5)) + 4 * np.eye(3, 5)[labels]
    dataset = hf.Dataset.from_arrays(x[:240], labels[:240], torch.tensor(x[240:]), torch.tensor(labels[240:]))
    federation = hf.federate(dataset, [range(0, 100), range(100, 120), range(120, 240)])
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run = hf.train(hf.FedAvg(), model, federation, rounds=15, lr=0.2, out=tmp_path / "run", device="cpu")
    assert run.accuracy > 0.9
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    # A program alone can make such a run again, and says so.
    with pytest.raises(hf.HoldfastError, match="is a Python object"):
        hf.Experiment.from_mapping(run.experiment)
    with pytest.raises(hf.HoldfastError, match="custom model"):
        hf.Run.open(tmp_path / "run")


def test_one_round_is_the_weighted_mean_of_what_clients_learn():
    """FedAvg by hand: full-batch steps of softmax regression, in NumPy."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    dataset = hf.Dataset.from_arrays(x, y, x, y)
    parts = [np.arange(0, 40), np.arange(40, 60)]
    model = nn.Sequential(nn.Linear(4, 3))
    start = model[0].weight.detach().numpy().astype(float), model[0].bias.detach().numpy().astype(float)
    run = hf.train(
        hf.FedAvg(),
        model,
        hf.federate(dataset, parts),
        rounds=1,
        local_epochs=2,
        batch_size=64,
        lr=0.5,
        device="cpu",
    )
    learnt = []
    for ids in parts:
        weight, bias = (a.copy() for a in start)
        for _ in range(2):
            scores = x[ids] @ weight.T + bias
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            error = (p - np.eye(3)[y[ids]]) / len(ids)
            weight, bias = weight - 0.5 * error.T @ x[ids], bias - 0.5 * error.sum(0)
        learnt.append((weight, bias))
    for got, index in ((run.model[0].weight, 0), (run.model[0].bias, 1)):
        expected = (40 * learnt[0][index] + 20 * learnt[1][index]) / 60
        np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("keep", [False, True])
def test_momentum_outlives_a_round_if_asked_to(engine, keep, tmp_path):
    """One client alone is torch's own SGD, whose optimiser lives for the whole run or for a round."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 3, 30)
    federation = hf.federate(hf.Dataset.from_arrays(x, y, x, y), [np.arange(30)])
    model = nn.Sequential(nn.Linear(4, 3))
    reference = nn.Sequential(nn.Linear(4, 3)).double()
    reference.load_state_dict(model.state_dict())
    optimiser = None
    for _ in range(3):
        if optimiser is None or not keep:
            optimiser = torch.optim.SGD(reference.parameters(), 0.3, momentum=0.9, weight_decay=0.01)
        for _ in range(2):
            loss = nn.functional.cross_entropy(reference(torch.from_numpy(x).double()), torch.from_numpy(y))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    settings = {
        "rounds": 3, "local_epochs": 2, "batch_size": 64, "lr": 0.3, "momentum": 0.9, "weight_decay": 0.01,
        "keep_optimizer": keep,
        "precision": "float64", "engine": engine, "device": "cpu", "out": tmp_path, "checkpoint_seconds": 0.0,
    }  # fmt: skip

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.train(hf.FedAvg(), model, federation, **settings, on_round=stop)
    run = hf.train(hf.FedAvg(), model, federation, **settings, resume=True)
    for got, wanted in zip(run.model.parameters(), reference.parameters(), strict=True):
        np.testing.assert_allclose(got.detach().numpy(), wanted.detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("drop", "steps"), [(False, 3), (True, 2)])
def test_a_last_batch_is_left_out_if_asked_to(engine, drop, steps):
    """Ten times the same sample in batches of four: every step is the same, whoever is in it."""
    x, y = np.tile(np.float32([[1.0, -2.0]]), (10, 1)), np.ones(10, np.int64)
    federation = hf.federate(hf.Dataset.from_arrays(x, y, x, np.arange(10) % 3), [np.arange(10)])
    model = nn.Sequential(nn.Linear(2, 3))
    weight, bias = (p.detach().double().numpy().copy() for p in model.parameters())
    for _ in range(2 * steps):
        p = np.exp(weight @ x[0] + bias)
        error = p / p.sum() - np.eye(3)[1]
        weight, bias = weight - 0.1 * np.outer(error, x[0]), bias - 0.1 * error
    run = hf.train(
        "fedavg", model, federation, rounds=1, local_epochs=2, batch_size=4, lr=0.1, drop_last=drop,
        precision="float64", engine=engine, device="cpu",
    )  # fmt: skip
    for got, wanted in zip(run.model.parameters(), (weight, bias), strict=True):
        np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-9)


def batch_normed(*, pixels=1, used=True):
    """A network whose BatchNorm sees so many values of a channel in each sample."""
    norm = nn.BatchNorm2d(2) if used else nn.Identity()
    return nn.Sequential(nn.AdaptiveAvgPool2d((1, pixels)), norm, nn.Flatten(), nn.Linear(2 * pixels, 3))


@pytest.mark.parametrize(
    ("model", "sizes", "settings", "warned"),
    [
        (batch_normed(), (10, 12, 8), {}, "1 of 3 clients have a last batch of as few as 2 samples"),
        (batch_normed(), (10, 11, 2), {}, "2 of 3 clients have a last batch of as few as 2 samples"),
        (
            batch_normed(),
            (9, 12, 2),
            {},
            None,
        ),  # a single sample joins another batch, a client's only one stays
        (batch_normed(), (10, 10, 10), {"drop_last": True}, None),
        (batch_normed(pixels=2), (10, 10, 10), {}, None),
        (batch_normed(used=False), (10, 10, 10), {}, None),
    ],
)
def test_batches_too_small_for_batch_norm_are_told_of(model, sizes, settings, warned):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(sizes), 2, 4, 4)).astype(np.float32), np.arange(sum(sizes)) % 3
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    federation = hf.federate(hf.Dataset.from_arrays(x, y, x, y), parts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.train("fedavg", model, federation, rounds=1, batch_size=4, device="cpu", **settings)
    told = [str(w.message) for w in caught if issubclass(w.category, hf.HoldfastWarning)]
    assert [message.partition(",")[0] for message in told] == ([] if warned is None else [warned])


def test_a_run_tells_how_to_run_it_again(federation, tmp_path):
    run = hf.train(
        hf.Stack(hf.FedNTD(), hf.FedProx(mu=0.2)), hf.models.mlp(16), federation, out=tmp_path, **SMALL
    )
    again = hf.Experiment.from_file(tmp_path / "experiment.yaml")
    assert again.build_federation().hash == federation.hash
    repeated = again.run()
    assert repeated.accuracy == run.accuracy
    opened = hf.Run.open(tmp_path)
    assert [r["accuracy"] for r in opened.records] == [r["accuracy"] for r in run.records]
    for key, value in run.model.state_dict().items():
        assert torch.equal(opened.model.state_dict()[key], value)
        assert torch.equal(repeated.model.state_dict()[key], value)


@pytest.mark.parametrize(("method", "kept"), [(hf.FedMLP(), True), (hf.Scaffold(), False)])
def test_a_finished_run_keeps_the_models_of_clients_alone(federation, tmp_path, method, kept):
    out = tmp_path / "run"
    hf.train(method, hf.models.mlp(16), federation, **SMALL, checkpoint_seconds=0.0, out=out)
    rounds = {path.name.split("-")[1] for path in (out / "checkpoint/clients").iterdir()}
    assert ("3" in rounds) == kept  # the last round's; the others are of earlier checkpoints
    assert hf.train(method, hf.models.mlp(16), federation, **SMALL, out=out, resume=True).accuracy > 0


def test_resume_refuses_another_experiment(federation, tmp_path):
    hf.train(hf.FedAvg(), hf.models.linear(), federation, out=tmp_path, **SMALL)
    with pytest.raises(hf.HoldfastError, match="already holds a run"):
        hf.train(hf.FedAvg(), hf.models.linear(), federation, out=tmp_path, **SMALL)
    with pytest.raises(hf.HoldfastError, match=r"another lr: it was 0\.1, now it is 0\.2"):
        hf.train(
            hf.FedAvg(), hf.models.linear(), federation, out=tmp_path, resume=True, **SMALL | {"lr": 0.2}
        )
    other = hf.federate(DIGITS, hf.Dirichlet(alpha=0.3), clients=8, seed=1)
    with pytest.raises(hf.HoldfastError, match="another federation, by its hash"):
        hf.train(hf.FedAvg(), hf.models.linear(), other, out=tmp_path, resume=True, **SMALL)


def test_a_run_of_a_version_without_a_setting_can_be_resumed(federation, tmp_path):
    hf.train(hf.FedAvg(), hf.models.linear(), federation, out=tmp_path, **SMALL)
    file = tmp_path / "experiment.yaml"
    lines = file.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith("drop_last")]
    assert len(older) == len(lines) - 1
    file.write_text("".join(older))
    (tmp_path / "checksums.json").unlink()  # older versions wrote none
    hf.train(hf.FedAvg(), hf.models.linear(), federation, out=tmp_path, resume=True, **SMALL)
    with pytest.raises(hf.HoldfastError, match="another drop_last: it was False, now it is True"):
        hf.train("fedavg", "linear", federation, out=tmp_path, resume=True, drop_last=True, **SMALL)


@pytest.fixture
def begun(federation, tmp_path):
    """A run of 3 rounds that was killed after a checkpoint of round 2."""
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        hf.train("fedavg", "linear", federation, out=out, checkpoint_seconds=0.0, on_round=_stop, **SMALL)
    return out


def _stop(record):
    if record["round"] == 2:
        raise KeyboardInterrupt


def edited(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_an_experiment_edited_since_is_noticed(begun):
    edited(begun / "experiment.yaml", "\nlr: 0.1\n", "\nlr: 0.2\n")
    with pytest.raises(hf.HoldfastError, match=r"does not match its SHA-256"):
        hf.Experiment.from_file(begun / "experiment.yaml").run(begun, resume=True)
    recorded = (begun / "checksums.json").read_bytes()
    (begun / "checksums.json").unlink()  # as if the edited file were accepted
    with pytest.raises(hf.HoldfastError, match=r"another lr: it was 0\.1, now it is 0\.2"):
        hf.Experiment.from_file(begun / "experiment.yaml").run(begun, resume=True)
    (begun / "checksums.json").write_bytes(recorded)
    edited(begun / "experiment.yaml", "\nlr: 0.2\n", "\nlr: 0.1\n")
    run = hf.Experiment.from_file(begun / "experiment.yaml").run(begun, resume=True)
    assert [record["round"] for record in run.records] == [1, 2, 3]


def test_other_pixels_of_the_same_samples_are_noticed(federation, begun):
    other = replace(federation, dataset=replace(federation.dataset, preprocess=hf.Preprocess((0.1,), (0.3,))))
    with pytest.raises(hf.HoldfastError, match="another preprocess"):
        hf.train("fedavg", "linear", other, out=begun, resume=True, **SMALL)


def test_records_that_are_missing_are_not_trained_again(federation, begun):
    whole = (begun / "metrics.jsonl").read_text()
    for lines in ([1], [0], []):  # of two
        (begun / "metrics.jsonl").write_text("".join(whole.splitlines(keepends=True)[i] for i in lines))
        with pytest.raises(
            hf.HoldfastError, match=r"checkpoint of round 2, but metrics.jsonl lacks records of rounds"
        ):
            hf.train("fedavg", "linear", federation, out=begun, resume=True, **SMALL)
    ahead = json.dumps(json.loads(whole.splitlines()[1]) | {"round": 3, "accuracy": 2.0})
    (begun / "metrics.jsonl").write_text(f"{whole}{ahead}\n")  # killed before the next checkpoint
    run = hf.train("fedavg", "linear", federation, out=begun, resume=True, **SMALL)
    assert [record["round"] for record in run.records] == [1, 2, 3]
    assert run.records[2]["accuracy"] <= 1  # trained, not taken over


def test_a_run_without_a_checkpoint_says_that_it_begins_again(federation, begun):
    shutil.rmtree(begun / "checkpoint")
    with pytest.warns(hf.HoldfastWarning, match="no checkpoint yet: it begins again with round 1"):
        run = hf.train("fedavg", "linear", federation, out=begun, resume=True, **SMALL)
    assert [record["round"] for record in run.records] == [1, 2, 3]
    shutil.rmtree(begun / "checkpoint")
    with pytest.raises(hf.HoldfastError, match="is finished, but its checkpoint is missing"):
        hf.train("fedavg", "linear", federation, out=begun, resume=True, **SMALL)
    assert len(hf.Run.open(begun).records) == 3  # nothing is lost by it


def test_a_resumed_run_is_computed_as_it_was_begun(federation, tmp_path, monkeypatch):
    describe = Training.describe
    with monkeypatch.context() as patched:  # as a version that had other kernels, or none
        patched.setattr(Training, "describe", lambda self: describe(self) | {"own_kernels": False})
        hf.train(
            "fedavg", "linear", federation, out=tmp_path, engine="vectorized", parallel_clients=2, **SMALL
        )
    made, prepare = [], hf.FedAvg.prepare
    monkeypatch.setattr(
        hf.FedAvg, "prepare", lambda self, context: made.append(context) or prepare(self, context)
    )
    monkeypatch.setattr(
        "holdfast.engine.factory.fitting_lanes", lambda *_: pytest.fail("lanes are known already")
    )
    hf.train("fedavg", "linear", federation, out=tmp_path, engine="vectorized", resume=True, **SMALL)
    assert not made[0].network.own_kernels


def test_lost_clients_are_named_and_the_run_goes_on(federation):
    run = hf.train(hf.FedAvg(), hf.models.linear(), federation, client_dropout=0.4, **SMALL | {"rounds": 8})
    lost = [incident for record in run.records for incident in record["incidents"]]
    assert lost
    assert {incident["kind"] for incident in lost} == {"dropout"}
    for record in run.records:
        gone = {incident["client"] for incident in record["incidents"]}
        assert gone.isdisjoint(record["participants"])
        assert len(gone) + len(record["participants"]) == 4


@dataclass(frozen=True)
class Spoiled(hf.Method):
    """FedAvg in which some clients' weights stop being numbers."""

    name: ClassVar[str] = "spoiled"
    bad: tuple[int, ...] = (0,)

    def client_init(self, payload, state, client):
        return {"factor": client.context.scalar(float("nan") if client.id in self.bad else 1.0)}

    def after_step(self, params, out, batch, carry):
        return {k: v * carry["factor"] for k, v in params.items()}, carry


@dataclass(frozen=True)
class SpoiledUpload(hf.Method):
    """FedAvg in which a client trains well and sends nonsense."""

    name: ClassVar[str] = "spoiled-upload"

    def upload_params(self, params, carry, client):
        return {k: v / 0 for k, v in params.items()} if client.id == 0 else params


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", [Spoiled(), SpoiledUpload()])
def test_updates_that_are_no_numbers_are_left_out(federation, engine, method):
    everyone = SMALL | {"clients_per_round": None, "engine": engine}
    run = hf.train(method, hf.models.linear(), federation, **everyone)
    for record in run.records:
        assert record["incidents"] == [{"client": 0, "kind": "not finite"}]
        assert 0 not in record["participants"]
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_round_without_any_usable_update_ends_the_run(federation):
    with pytest.raises(hf.HoldfastError, match="no usable update is left"):
        hf.train(Spoiled(tuple(range(8))), hf.models.linear(), federation, **SMALL)


def _timeless(records):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_a_round_that_begins_while_the_last_one_is_tested_changes_nothing(federation, tmp_path, monkeypatch):
    settings = SMALL | {"rounds": 5, "evaluate_locals": False}
    plain = hf.train(hf.FedAvg(), hf.models.linear(), federation, **settings)
    monkeypatch.setattr("holdfast.training.execution.overlaps_rounds", lambda training: True)
    told = []
    ahead = hf.train(
        hf.FedAvg(), hf.models.linear(), federation, out=tmp_path / "run", on_round=told.append, **settings
    )
    assert _timeless(ahead.records) == _timeless(plain.records)
    assert told == ahead.records == RunDirectory.open(tmp_path / "run").records()
    for one, other in zip(ahead.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_round_is_kept_while_the_next_one_is_with_the_gpu(federation, monkeypatch):
    monkeypatch.setattr("holdfast.training.execution.overlaps_rounds", lambda training: True)
    launch, events = RoundLoop.start_round, []

    def told(self, number, *rest):
        events.append(f"begin {number}")
        launched = launch(self, number, *rest)
        events.append(f"end {number}")
        return launched

    monkeypatch.setattr(RoundLoop, "start_round", told)
    hf.train(
        hf.FedAvg(), hf.models.linear(), federation, engine="vectorized",
        on_round=lambda record: events.append(f"keep {record['round']}"),
        **SMALL | {"rounds": 3, "evaluate_locals": False},
    )  # fmt: skip
    told_of = ", ".join(events)
    assert told_of == "begin 1, end 1, begin 2, keep 1, end 2, begin 3, keep 2, end 3, keep 3"


def test_the_end_of_a_run_may_be_written_by_another_thread(federation, tmp_path):
    handed = []
    run = hf.train(
        hf.FedAvg(),
        "linear",
        federation,
        rounds=2,
        lr=0.1,
        out=tmp_path / "run",
        submit_final_write=handed.append,
    )
    directory = RunDirectory.open(tmp_path / "run")
    assert len(directory.records()) == len(run.records) == 2
    assert not directory.finished
    with pytest.raises(hf.HoldfastError, match="in use by process"), directory.lock():
        pass
    thread = Thread(target=handed.pop())
    thread.start()
    thread.join()
    assert directory.finished
    assert directory.load_checkpoint().round == 2
    with directory.lock():
        pass
    for name, value in run.model.state_dict().items():
        assert torch.equal(directory.load_model()[name], value)


def test_a_round_still_under_test_is_kept_when_the_next_one_fails(federation, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.training.execution.overlaps_rounds", lambda training: True)
    launch = RoundLoop.start_round

    def fails_in_the_fourth(self, number, *rest):
        if number == 4:
            raise hf.HoldfastError("lost")
        return launch(self, number, *rest)

    monkeypatch.setattr(RoundLoop, "start_round", fails_in_the_fourth)
    with pytest.raises(hf.HoldfastError, match="lost"):
        hf.train(
            hf.FedAvg(), hf.models.linear(), federation, out=tmp_path / "run",
            **SMALL | {"rounds": 5, "evaluate_locals": False},
        )  # fmt: skip
    kept = RunDirectory.open(tmp_path / "run").records()
    assert [record["round"] for record in kept] == [1, 2, 3]
    assert all("accuracy" in record for record in kept)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"keep_optimizer": True}, "must be false for optimizer sgd where momentum is 0"),
        ({"client_dropout": 1.0}, "client_dropout is 1.0"),
        ({"engine": "vectorised"}, "did you mean vectorized"),
        ({"precision": "float15"}, "did you mean float"),
        ({"precision": "half"}, "known: auto, bfloat16, float16, float32, float64, tf32"),
        ({"device": "gpu"}, "it must be auto, cpu or cuda"),
        ({"batchnorm": "none"}, "it must be average, local or drop"),
    ],
)
def test_bad_settings_are_refused_before_training(federation, changes, sentence):
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.train(hf.FedAvg(), hf.models.linear(), federation, **SMALL | changes)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), "has 9 outputs, but digits has 10 classes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 10)), "does not take samples of digits"),
        (nn.Sequential(nn.Linear(8, 10)), r"it must be \(1, 10\)"),
    ],
)
def test_models_that_do_not_fit_are_refused(federation, model, sentence):
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.train(hf.FedAvg(), model, federation, **SMALL)


def test_public_names_are_complete():
    for name in hf.api.__all__:
        assert getattr(hf, name) is getattr(hf.api, name)
    assert {"train", "FedNTD", "models", "__version__"} <= set(dir(hf))
    offered = {name for name in dir(hf) if not name.startswith("_")}
    assert offered == {
        *hf.api.__all__,
        "methods",
        "metrics",
        "models",
    }  # and nothing that holdfast itself imports
    with pytest.raises(AttributeError, match="holdfast has no 'fedavgg'"):
        hf.fedavgg
