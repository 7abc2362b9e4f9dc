"""Exported programs give the run's scores in the programs that they are for; cards hold what the run recorded."""

import csv
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast as hf
from holdfast.runs import RunDirectory

DIGITS = hf.load("digits")
SMALL = {"lr": 0.1, "seed": 0, "progress": False}


@pytest.fixture(scope="module")
def federation():
    return hf.federate(DIGITS, hf.Dirichlet(alpha=0.3), clients=4, seed=0)


@pytest.fixture(scope="module")
def run(federation):
    return hf.train("fedntd:beta=0.5", "mlp:16", federation, rounds=3, **SMALL)


class Reader(nn.Module):
    """A network of tokens, the user's own."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


@pytest.fixture(scope="module")
def of_tokens():
    x = np.random.default_rng(0).integers(0, 20, (120, 6))
    data = hf.Dataset.from_arrays(x, x[:, 0] > 9)
    return hf.train("fedavg", Reader(), hf.federate(data, hf.IID(), clients=3), rounds=1, **SMALL), x


def logits(run, x):
    with torch.no_grad():
        return run.scoring_model(x)


def onnx_scores(path, x):
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    return session.run(["scores"], {"x": x.numpy()})[0]


def test_weights(run, tmp_path):
    weights = run.model.state_dict()
    for read in (
        torch.load(run.export(tmp_path / "m.pt"), weights_only=True),
        load_file(run.export(tmp_path / "m.safetensors")),
        torch.load(run.export(tmp_path / "model.bin", "state_dict"), weights_only=True),
    ):
        assert read.keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in read.items())


def test_a_torch_program_takes_any_batch(run, tmp_path):
    program = torch.export.load(run.export(tmp_path / "new" / "m.pt2")).module()
    x = DIGITS.preprocess(DIGITS.x_test)
    for n in (1, 7, len(x)):
        torch.testing.assert_close(program(x[:n]), logits(run, x[:n]))


def test_onnx_agrees_with_torch_in_onnxruntime(run, of_tokens, tmp_path):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    x = DIGITS.preprocess(DIGITS.x_test)
    path = run.export(tmp_path / "m.onnx")
    for n in (1, 7, len(x)):
        np.testing.assert_allclose(onnx_scores(path, x[:n]), logits(run, x[:n]), atol=1e-5)
    own, tokens = of_tokens
    x = torch.from_numpy(tokens)
    np.testing.assert_allclose(onnx_scores(own.export(tmp_path / "t.onnx"), x), logits(own, x), atol=1e-5)


def test_whole_numbers_go_into_a_torch_program(of_tokens, tmp_path):
    run, tokens = of_tokens
    x = torch.from_numpy(tokens)
    program = torch.export.load(run.export(tmp_path / "m.pt2")).module()
    torch.testing.assert_close(program(x[:5]), logits(run, x[:5]))


def test_a_program_predicts_by_the_methods_rule(federation, tmp_path):
    run = hf.train("fedetf", "mlp:16", federation, rounds=1, **SMALL)
    program = torch.export.load(run.export(tmp_path / "m.pt2")).module()
    x = DIGITS.preprocess(DIGITS.x_test)
    assert (program(x).argmax(1).numpy() == run.predict(DIGITS)).all()
    # s u of FedETF has zero sum over classes, which plain logits do not have
    np.testing.assert_allclose(program(x).sum(1).detach(), 0, atol=1e-4)
    assert abs(run.model(x).sum(1)).max() > 0.01


def test_a_run_of_an_earlier_version_does_not_name_the_type_of_its_samples(run, of_tokens, tmp_path):
    own, tokens = of_tokens
    for each, x in ((run, DIGITS.preprocess(DIGITS.x_test)), (own, torch.from_numpy(tokens))):
        known = {key: value for key, value in each.experiment.items() if key != "sample_dtype"}
        older = hf.Run(known, each.records, each.model)
        program = torch.export.load(older.export(tmp_path / "m.pt2")).module()
        torch.testing.assert_close(program(x), each.model(x))


def test_metrics(run, tmp_path):
    with open(run.export(tmp_path / "m.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in rows] == run.metric("accuracy").tolist()
    assert [float(row["accuracy_3"]) for row in rows] == run.class_accuracy[:, 3].tolist()


def cells(card):
    return dict(
        line[2:-2].split(" | ") for line in card.splitlines() if line.startswith("| ") and line != "| | |"
    )


def test_the_card_holds_what_was_recorded(run, federation, tmp_path):
    card = run.export(tmp_path / "README.md").read_text()
    assert card.startswith("# fedntd on digits\n")
    found = cells(card)
    sizes = federation.sizes(0)
    assert found["hash"] == f"`{federation.hash}`"
    assert found["training samples of a client"].startswith(f"{sizes.min()} to {sizes.max()}, ")
    assert found["method"].startswith("fedntd: beta 0.5")
    assert found["partition"].startswith("dirichlet: alpha 0.3")
    assert (found["rounds"], found["lr"], found["seed"], found["clients"]) == ("3", "0.1", "0", "4")
    assert found["accuracy of the final model"] == f"{run.accuracy:.2%}"
    assert found["best accuracy of any round"] == f"{run.metric('accuracy').max():.2%}"
    assert found["forgetting, mean over classes of best minus final"] == f"{run.forgetting:.2%}"
    worst = int(run.class_accuracy[-1].argmin())
    assert found["weakest class, accuracy"] == f"{worst}: {run.class_accuracy[-1, worst]:.2%}"
    assert found["preprocessing"] == "divide by 255, subtract 0.3053, divide by 0.376"
    assert found["torch"] == run.experiment["versions"]["torch"]
    assert f"4, {sum(p.numel() for p in run.model.parameters()):,} numbers" == found["tensors"]


def test_the_card_of_own_objects_and_of_a_regression(of_tokens, tmp_path):
    card = of_tokens[0].export(tmp_path / "c.md").read_text()
    assert cells(card)["architecture"] == "Reader (own)"
    assert 'hf.Run.open("RUN", model=Net())' in card
    x = np.random.default_rng(0).normal(size=(80, 3))
    federation = hf.federate(hf.Dataset.from_arrays(x, x.sum(1)), hf.IID(), clients=3)
    run = hf.train("fedavg", "linear", federation, rounds=2, validation=0.2, **SMALL | {"lr": 0.01})
    found = cells(run.export(tmp_path / "r.md").read_text())
    assert found["mae of the final model"] == f"{run.metric('mae')[-1]:.4g}"
    assert found["rmse on the clients' validation samples"] == f"{run.validation('rmse')[-1]:.4g}"
    assert found["strata"] == ", ".join(run.experiment["classes"])


# Bad input ------------------------------------------------------------------------------------------------


def test_another_format_is_refused(run, tmp_path):
    with pytest.raises(hf.HoldfastError, match="unknown export format 'onx'; did you mean onnx"):
        run.export(tmp_path / "m.onnx", "onx")
    with pytest.raises(
        hf.HoldfastError, match=r"must end in \.pt, \.safetensors, .*or a format must be given"
    ):
        run.export(tmp_path / "m.h5")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_onnx_without_its_packages_is_one_sentence(package, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    other = {"onnx": "onnxscript", "onnxscript": "onnx"}[package]
    monkeypatch.setitem(sys.modules, other, sys)  # as if it were installed
    with pytest.raises(hf.HoldfastError, match=rf"needs {package}: pip install 'holdfast-fl\[export\]'"):
        run.export(tmp_path / "m.onnx")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        y = self.head(x.flatten(1))
        return y if float(y.detach().sum()) > 0 else y * 1.0


def test_a_model_that_no_program_can_hold_is_one_sentence(federation, tmp_path, capfd):
    run = hf.train("fedavg", Branching(), federation, rounds=1, engine="sequential", **SMALL)
    capfd.readouterr()
    with pytest.raises(
        hf.HoldfastError, match=r"cannot be exported by torch\.export: .*; its weights can be"
    ) as raised:
        run.export(tmp_path / "m.pt2")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_an_unfinished_run_has_metrics_but_no_weights(tmp_path):
    from typer.testing import CliRunner

    from holdfast.cli import app

    directory = RunDirectory.create(tmp_path / "run", {"method": {"name": "mine"}, "rounds": 3})
    for name, code in (("m.csv", 0), ("m.pt", 2)):
        result = CliRunner().invoke(app, ["export", str(directory.path), str(tmp_path / name)])
        assert result.exit_code == code
    assert "has no final model yet" in result.stderr
