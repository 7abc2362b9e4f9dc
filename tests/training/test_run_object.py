"""A run as an object: its table, figures, page, predictions, personal models and files, compared with the records."""

import json
import os
import re
import signal
import sys
import warnings
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.special import expit, softmax
from torch import nn

import holdfast as hf
from holdfast.report import figure, notebook, table
from holdfast.runs import RunDirectory, read_audit, verify_audit

DIGITS = hf.load("digits")
TESTED = len(DIGITS.y_test)
SMALL = {"rounds": 3, "lr": 0.1, "seed": 0, "progress": False}


@pytest.fixture(scope="module")
def federation():
    return hf.federate(DIGITS, hf.Dirichlet(alpha=0.3), clients=5, seed=0)


@pytest.fixture(scope="module")
def run(federation):
    return hf.train("fedntd", "mlp:16", federation, **SMALL)


@pytest.fixture(scope="module")
def stored(federation, tmp_path_factory):
    """The same run with a directory."""
    return hf.train("fedntd", "mlp:16", federation, out=tmp_path_factory.mktemp("r") / "run", **SMALL)


def train(data, model="mlp:8", clients=4, **settings):
    return hf.train(
        "fedavg", model, hf.federate(data, hf.IID(), clients=clients), **SMALL | {"rounds": 1} | settings
    )


# Tables and figures ---------------------------------------------------------------------------------------


def test_the_frame_has_the_numbers_of_the_records(run):
    pytest.importorskip("pandas")
    frame = run.to_frame()
    assert frame["round"].tolist() == [1, 2, 3]
    for name in ("accuracy", "loss", "train_loss", "bytes_up", "lr"):
        assert frame[name].tolist() == [record[name] for record in run.records]
    assert frame["accuracy_7"].tolist() == run.class_accuracy[:, 7].tolist()
    assert frame["clients"].tolist() == [5, 5, 5]
    assert frame["seconds_total"].tolist() == [record["seconds"]["total"] for record in run.records]
    assert np.isnan(frame["forgetting"][0])
    assert frame["forgetting"][2] == run.records[2]["forgetting"]


def test_the_frame_of_a_regression_names_its_error_by_stratum():
    pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(80, 3))
    run = train(hf.Dataset.from_arrays(x, x.sum(1)), lr=0.01)
    names = run.experiment["classes"]
    assert run.to_frame()[f"mae_{names[1]}"][0] == run.records[0]["class_mae"][1]


def test_without_pandas_one_sentence_names_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hf.HoldfastError, match="to_frame needs pandas: pip install pandas"):
        run.to_frame()


def test_curves_show_the_records(run):
    for name in ("loss", "train_loss"):
        (axes,) = run.plot(name).axes
        (line,) = axes.lines
        assert line.get_xdata().tolist() == [1, 2, 3]
        assert line.get_ydata().tolist() == [record[name] for record in run.records]
    (axes,) = run.plot("local_in").axes
    assert axes.lines[0].get_ydata()[2] == pytest.approx(np.mean(run.records[2]["local_in"]))
    (axes,) = run.plot("seconds.train").axes
    assert axes.lines[0].get_ydata()[0] == run.records[0]["seconds"]["train"]
    first = run.plot().axes[0]
    assert first.lines[0].get_ydata().tolist() == run.metric("accuracy").tolist()


def test_scores_by_class_are_a_heat_map_or_lines(run):
    axes, _ = run.plot("class_accuracy").axes  # and its colour bar
    np.testing.assert_array_equal(axes.images[0].get_array(), run.class_accuracy.T)
    x = np.random.default_rng(0).normal(size=(80, 3))
    errors = train(hf.Dataset.from_arrays(x, x.sum(1)), lr=0.01)
    (axes,) = errors.plot("class_mae").axes
    assert [line.get_ydata()[0] for line in axes.lines] == errors.records[0]["class_mae"]
    assert [line.get_label() for line in axes.lines] == errors.experiment["classes"]


def test_any_figure_of_the_report_can_be_plotted(run):
    for name in ("classes", "partition"):
        assert run.plot(name)._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(
        hf.HoldfastError, match="'stages' cannot be drawn from these runs: these runs did not"
    ):
        run.plot("stages")


def test_an_unknown_metric_is_refused_with_similar_ones(run):
    with pytest.raises(
        hf.HoldfastError, match="unknown metric of this run 'accurracy'; did you mean accuracy"
    ):
        run.plot("accurracy")


def test_figures_and_tables_take_runs_and_paths_alike(run, stored, tmp_path):
    for given, name in ((stored, "a"), (stored.path, "b"), (str(stored.path), "c"), ([stored], "d")):
        figure("classes", given, tmp_path / f"{name}.svg")
    drawn = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(drawn) == 1
    both = table([run, stored.path], "csv").splitlines()
    assert [line.split(",")[:2] for line in both] == [["method", "seeds"], ["fedntd", "2"]]
    with pytest.raises(hf.HoldfastError, match="is not a run; pass the result of train or compare"):
        figure("classes", [3], tmp_path / "a.svg")


def test_the_page_of_a_run_with_and_without_a_directory(run, stored, tmp_path):
    assert stored.report() == stored.path / "report.html"
    here = run.report(tmp_path / "new" / "page.html")
    elsewhere = run.report()
    assert here.read_bytes() == elsewhere.read_bytes()
    assert elsewhere.name == "report.html"
    page = here.read_text()
    assert "fedntd on digits" in page
    assert f"{run.accuracy:.2%}"[:-1] in page
    assert "src=" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # it loads nothing


# In a notebook --------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """The texts of an HTML fragment; every tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_notebook_shows_a_table_with_the_curve(run, stored):
    texts = Reader(run._repr_html_()).texts
    assert texts[:3] == ["fedntd", "data", "digits, 5 clients"]
    assert f"accuracy {run.accuracy:.2%}" in texts
    assert f"{run.forgetting:.2%}" in texts
    assert str(stored.path) in Reader(stored._repr_html_()).texts


def test_the_curve_has_a_point_for_each_round_between_lowest_and_highest():
    picture = ElementTree.fromstring(notebook.sparkline([0.1, 0.5, float("nan"), 0.3], "a < b"))
    assert picture.get("aria-label") == "a < b"
    x, y = np.array([p.split(",") for p in picture.find("polyline").get("points").split()], float).T
    np.testing.assert_allclose(np.diff(x), [(x[-1] - x[0]) / 3, 2 * (x[-1] - x[0]) / 3], atol=0.11)
    np.testing.assert_allclose((y[0] - y) / (y[0] - y[1]), [0, 1, 0.5], atol=0.02)  # downwards in pixels
    assert notebook.sparkline([0.5], "one") == ""


def test_names_cannot_break_the_table():
    assert Reader(notebook.properties("<script>", {"a": "<b>&"})).texts == ["<script>", "a", "<b>&"]


def test_a_run_whose_model_was_not_tested_is_shown(federation):
    run = hf.train("fedavg", "linear", federation, evaluate_every=5, **SMALL)
    run.records[:] = run.records[:2]  # as after an interrupt
    run.interrupted = True
    assert repr(run) == "Run(fedavg, 2 of 3 rounds, not tested)"
    assert "not tested" in run._repr_html_()


# Prediction -----------------------------------------------------------------------------------------------


def test_predictions_are_those_that_were_tested(run):
    predicted = run.predict(DIGITS)
    assert predicted.dtype == np.int64
    assert (predicted == DIGITS.y_test.numpy()).mean() == run.accuracy
    raw = DIGITS.x_test.numpy()
    for same in (raw, raw[:, 0], torch.from_numpy(raw), np.moveaxis(raw, 1, 3), raw.astype(int)):
        assert (run.predict(same) == predicted).all()
    probabilities = run.predict_proba(raw)
    with torch.no_grad():
        logits = run.model(DIGITS.preprocess(DIGITS.x_test)).numpy()
    np.testing.assert_allclose(probabilities, softmax(logits, 1), atol=1e-6)
    assert (probabilities.argmax(1) == predicted).all()


def test_prediction_is_in_evaluation_mode_and_leaves_the_model_as_it_was(federation):
    run = hf.train("fedavg", _Dropping(), federation, **SMALL)
    run.model.train()
    assert (run.predict(DIGITS) == DIGITS.y_test.numpy()).mean() == run.accuracy
    assert run.model.training


class _Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.drop(self.norm(x).flatten(1)))


def test_each_task_predicts_in_the_form_of_its_targets():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)

    def outputs(run):
        with torch.no_grad():
            return run.model(torch.from_numpy(x)).double().numpy()

    binary = train(hf.Dataset.from_arrays(x, x[:, 0] > 0, task="binary"))
    z = outputs(binary)[:, 0]
    assert (binary.predict(x) == (z > 0)).all()
    np.testing.assert_allclose(binary.predict_proba(x), np.stack([expit(-z), expit(z)], 1), atol=1e-6)

    labels = train(hf.Dataset.from_arrays(x, (x > 0).astype(float), task="multilabel"))
    assert (labels.predict(x) == (outputs(labels) > 0)).all()
    np.testing.assert_allclose(labels.predict_proba(x), expit(outputs(labels)), atol=1e-6)

    values = train(hf.Dataset.from_arrays(x, x.sum(1), task="regression"), lr=0.01)
    np.testing.assert_allclose(values.predict(x), outputs(values)[:, 0], atol=1e-6)
    several = train(hf.Dataset.from_arrays(x, x[:, :2], task="regression"), lr=0.01)
    assert several.predict(x).shape == (120, 2)

    counts = train(hf.Dataset.from_arrays(x, rng.poisson(2, 120), task="counts"), lr=0.01)
    np.testing.assert_allclose(counts.predict(x), np.exp(outputs(counts)[:, 0]), rtol=1e-5)

    times = np.stack([rng.exponential(size=120), np.arange(120) % 2], 1)
    risks = train(hf.Dataset.from_arrays(x, times, task="survival"), lr=0.01)
    np.testing.assert_allclose(risks.predict(x), outputs(risks)[:, 0], atol=1e-6)
    for run in (values, counts, risks):
        with pytest.raises(hf.HoldfastError, match="have no probabilities; use predict instead"):
            run.predict_proba(x)


def test_tokens_are_predicted_at_every_position():
    tokens = np.random.default_rng(0).integers(0, 12, (60, 7))
    data = hf.Dataset.from_arrays(tokens[:, :-1], tokens[:, 1:], task="sequence")
    run = train(data, "char-transformer:width=8,heads=2,layers=1", lr=0.01)
    held = data.y_test.numpy()
    assert (run.predict(data) == held).mean() == pytest.approx(run.accuracy)
    probabilities = run.predict_proba(data)
    assert probabilities.shape == (*held.shape, 12)
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    with pytest.raises(
        hf.HoldfastError, match="numbers from 40 to 40, at least one of which is not a valid index"
    ):
        run.predict(np.full((2, 6), 40))
    with pytest.raises(hf.HoldfastError, match="the samples of the run are whole numbers"):
        run.predict(np.full((2, 6), 0.5))


def test_whole_numbers_for_a_model_of_floats():
    x = np.random.default_rng(0).integers(0, 9, (80, 3))
    run = train(hf.Dataset.from_arrays(x, x[:, 0] > 4))
    assert run.experiment["sample_dtype"] == "float32"
    with torch.no_grad():
        assert (run.predict(x) == run.model(torch.from_numpy(x).float()).argmax(1).numpy()).all()


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.zeros((3, 1, 9, 9), np.uint8), r"shape \(1, 9, 9\), but those of the run have shape \(1, 8, 8\)"),
        (np.zeros((1, 8, 8)), r"a single sample is x\[None\]"),
        (
            np.zeros((3, 1, 8, 8)),
            "holds float32, but the samples of the run are images of whole numbers from 0",
        ),
        (np.full((3, 1, 8, 8), np.nan), "contains NaN or infinite values in 3 of 3"),
        ("digits", "x must be an array of numbers"),
        (np.zeros((0, 1, 8, 8)), "x is empty"),
    ],
)
def test_other_samples_are_refused(run, x, sentence):
    with pytest.raises(hf.HoldfastError, match=sentence):
        run.predict(x)


# Personal models ------------------------------------------------------------------------------------------

EPOCHS = {"local_epochs": 2, "local_test_samples": TESTED, "engine": "sequential"}


@pytest.mark.parametrize("method", ["ditto", "local", "fedproto", "fedfomo"])
def test_a_client_that_keeps_its_trained_model_predicts_as_it_was_tested(method, federation, tmp_path):
    run = hf.train(method, "mlp:16", federation, **SMALL | EPOCHS)
    last = run.records[-1]
    again = hf.Run.open(run.save(tmp_path / "run"))
    for client, accuracy in zip(last["participants"], last["locals"]["accuracy"], strict=True):
        predicted = run.predict(DIGITS, client=client)
        assert (predicted == DIGITS.y_test.numpy()).mean() == pytest.approx(accuracy)
        assert (again.predict(DIGITS, client=client) == predicted).all()


@pytest.mark.parametrize("method", ["fedrep", "fedmlp", "fedpac", "fedala:top=2"])
def test_a_client_with_a_classifier_of_its_own_shares_the_body(method, federation):
    run = hf.train(method, "mlp:16", federation, **SMALL | EPOCHS)
    shared, own = run.model.state_dict(), [run.personal_model(k).state_dict() for k in (0, 1)]
    head = [name for name in shared if name.startswith(list(shared)[-1].rpartition(".")[0])]
    assert len(head) == 2
    for name in shared:
        assert torch.equal(own[0][name], own[1][name]) == (name not in head)
        assert torch.equal(own[0][name], shared[name]) == (name not in head)


@pytest.mark.parametrize("method", ["fedbabu", "fedrod"])
def test_a_classifier_beside_the_model_is_applied_to_its_features(method, federation, tmp_path):
    run = hf.train(method, "mlp:16", federation, out=tmp_path / "run", **SMALL | EPOCHS)
    weights = {name: value.double().numpy() for name, value in run.model.state_dict().items()}
    (w1, b1), (w2, b2) = (list(weights.values())[at : at + 2] for at in (0, 2))
    x = DIGITS.preprocess(DIGITS.x_test).flatten(1).double().numpy()
    features = np.maximum(x @ w1.T + b1, 0)
    kept = RunDirectory.open(tmp_path / "run").load_checkpoint().client(3)["method/head"].double().numpy()
    scores = np.hstack([features, np.ones((len(x), 1))]) @ kept.T
    if method == "fedrod":
        scores += features @ w2.T + b2
    np.testing.assert_allclose(run.predict_proba(DIGITS, client=3), softmax(scores, 1), atol=1e-5)


def test_batchnorm_that_stays_with_its_client(federation):
    run = hf.train("fedavg", _Dropping(), federation, batchnorm="local", **SMALL)
    statistics = [run.personal_model(k).state_dict()["norm.running_mean"] for k in (0, 1)]
    data = DIGITS.preprocess(DIGITS.x_train[federation.client(0)])
    assert not torch.equal(*statistics)
    # Exponential averages of the batches' means, with momentum 0.1 and some 3 rounds of batches.
    assert abs(float(statistics[0]) / float(data.mean()) - 1) < 1.5
    assert (run.predict(DIGITS, client=0) != run.predict(DIGITS, client=1)).any()


def test_a_stack_has_the_personal_models_of_its_part(federation):
    alone, stacked = (
        hf.train(m, "mlp:16", federation, **SMALL | EPOCHS) for m in ("fedrep", "fedrep+fedprox:mu=0")
    )
    assert (alone.predict(DIGITS, client=2) == stacked.predict(DIGITS, client=2)).all()


def test_where_there_is_no_personal_model_one_sentence_says_why(run, federation):
    with pytest.raises(hf.HoldfastError, match="fedntd trains one model for all clients"):
        run.personal_model(0)
    few = hf.train("ditto", "linear", federation, clients_per_round=1, **SMALL | {"rounds": 1} | EPOCHS)
    absent = next(k for k in range(5) if k not in few.records[0]["participants"])
    with pytest.raises(hf.HoldfastError, match=rf"client {absent} took part in no round.* from 0 to 4\)"):
        few.personal_model(absent)
    with pytest.raises(hf.HoldfastError, match="client is -1; it must be at least 0"):
        few.personal_model(-1)


def test_a_state_that_was_not_kept_is_named(federation, tmp_path):
    run = hf.train("ditto", "linear", federation, out=tmp_path / "run", **SMALL | {"rounds": 1} | EPOCHS)
    directory = RunDirectory.open(tmp_path / "run")
    last = directory.load_checkpoint()
    bare = hf.Run.open(tmp_path / "run")
    bare.checkpoint = type(last)(last.round, last.tensors, last.meta, {})
    with pytest.raises(hf.HoldfastError, match="the state of client 1 was not kept after the last round"):
        bare.personal_model(1)
    assert run.personal_model(1) is not None


class Halved(hf.Method):
    """Predicts by half of the logits, so that probabilities differ from the model's."""

    def global_logits(self, out, server):
        return out.logits / 2


def test_a_methods_rule_for_predictions_is_followed(federation, tmp_path):
    run = hf.train("fedproto", "mlp:16", federation, **SMALL)
    assert (run.predict(DIGITS) == DIGITS.y_test.numpy()).mean() == run.accuracy
    again = hf.Run.open(run.save(tmp_path / "proto"))
    assert (again.predict_proba(DIGITS) == run.predict_proba(DIGITS)).all()
    own = hf.train(Halved(), "linear", federation, **SMALL)
    with torch.no_grad():
        logits = own.model(DIGITS.preprocess(DIGITS.x_test)).numpy()
    np.testing.assert_allclose(own.predict_proba(DIGITS), softmax(logits / 2, 1), atol=1e-6)


# Files ----------------------------------------------------------------------------------------------------


def contents(path):
    """The files of a run that do not contain times."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return (
        [{key: value for key, value in record.items() if key != "seconds"} for record in records],
        (path / "experiment.yaml").read_text(),
        (path / "federation.json").read_text(),
        {name: value.tolist() for name, value in load_file(path / "model.safetensors").items()},
    )


def test_a_saved_run_is_that_of_a_directory(run, stored, tmp_path):
    saved = run.save(tmp_path / "saved")
    assert contents(saved) == contents(stored.path)
    one, other = (RunDirectory.open(path).load_checkpoint() for path in (saved, stored.path))
    assert (one.round, one.meta) == (other.round, other.meta)
    assert all(torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())
    again = hf.Run.open(saved)
    assert repr(again) == repr(run)[:-1] + f", in '{saved}')"
    assert (again.predict_proba(DIGITS) == run.predict_proba(DIGITS)).all()
    assert contents(again.save(tmp_path / "copy")) == contents(saved)
    assert [entry["event"] for entry in read_audit(saved)] == ["saved", "ended"]
    assert [verify_audit(path).problem for path in (saved, tmp_path / "copy")] == [None, None]
    hf.resume(saved, rounds=4)
    assert [entry["event"] for entry in read_audit(saved)][2:] == ["extended", "round", "ended"]
    assert verify_audit(saved).problem is None
    with pytest.raises(hf.HoldfastError, match="already holds a run"):
        run.save(saved)
    with pytest.raises(hf.HoldfastError, match="already holds a run"):
        again.save(saved)


def test_a_saved_run_is_trained_further_with_the_same_bits(federation, tmp_path):
    long = hf.train("scaffold", "linear", federation, **SMALL | {"rounds": 4})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short = hf.train(
            "scaffold", "linear", federation, **SMALL | {"rounds": 4},
            on_round=lambda record: os.kill(os.getpid(), signal.SIGINT) if record["round"] == 2 else None,
        )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    assert short.interrupted
    resumed = hf.resume(short.save(tmp_path / "run"))
    assert all(
        torch.equal(p, q) for p, q in zip(*(r.model.parameters() for r in (long, resumed)), strict=True)
    )


def test_own_objects_are_given_when_a_run_is_opened(federation, tmp_path):
    run = hf.train(Halved(), _Dropping(), federation, **SMALL)
    path = run.save(tmp_path / "run")
    with pytest.raises(
        hf.HoldfastError, match="holds a custom model, '_Dropping'; create it in Python and pass"
    ):
        hf.Run.open(path)
    with pytest.raises(hf.HoldfastError, match="does not have the tensors of the run"):
        hf.Run.open(path, model=nn.Linear(64, 10))
    with pytest.raises(hf.HoldfastError, match=r"it must be a torch\.nn\.Module"):
        hf.Run.open(path, model="mlp:8")
    again = hf.Run.open(path, model=_Dropping(), method=Halved())
    assert (again.predict_proba(DIGITS) == run.predict_proba(DIGITS)).all()


def test_preprocessing_named_in_an_experiment_is_applied(tmp_path):
    experiment = hf.Experiment(data="digits", clients=3, model="linear", rounds=1, lr=0.1)
    experiment.run(tmp_path / "named", progress=False)
    settings = (tmp_path / "named" / "experiment.yaml").read_text()
    assert "\npreprocess: plain\n" in settings
    run = hf.Run.open(tmp_path / "named")
    assert (run.predict(DIGITS) == DIGITS.y_test.numpy()).mean() == run.accuracy
    of_0_1 = {key: value for key, value in run.experiment.items() if not key.startswith("sample_")}
    older = hf.Run(of_0_1, run.records, run.model)
    assert (older.predict(DIGITS) == run.predict(DIGITS)).all()
