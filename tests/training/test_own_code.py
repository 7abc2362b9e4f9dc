"""Methods, models and data of the user's own in experiments, runs and comparisons, by object and by reference."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.runs import RunDirectory
from holdfast.training.checkpointing import refuse_change

X = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
Y = np.arange(90) % 3
DATA = hf.Dataset.from_arrays(X, Y, X[:30], Y[:30], name="sixes")
SHORT = {"rounds": 2, "lr": 0.1, "evaluate_locals": False, "device": "cpu"}

CODE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

import holdfast as hf


@dataclass(frozen=True)
class Pull(hf.Method):
    name: ClassVar[str] = "pull"
    mu: float = 0.1

    def proximal_mu(self):
        return self.mu


def net(shape, num_classes, width=4):
    return nn.Sequential(nn.Linear(*shape, width), nn.ReLU(), nn.Linear(width, num_classes))


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.last = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.last(x)


fixed = net((6,), 3)


def data(samples=90):
    x = np.random.default_rng(0).normal(size=(samples, 6)).astype(np.float32)
    y = np.arange(samples) % 3
    return hf.Dataset.from_arrays(x, y, x[:30], y[:30], name="sixes")


def sites(seed):
    return hf.federate(data(), hf.Dirichlet(1.0), clients=3, seed=seed)


whole = hf.federate(data(), hf.IID(), clients=3, seed=0)


def broken(seed):
    return {}["site"]


def nothing():
    return 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


@dataclass(frozen=True)
class Push(hf.Method):
    name: ClassVar[str] = "push"
    mu: float = 0.1

    def proximal_mu(self):
        return self.mu / 2


@dataclass(frozen=True)
class Holding(hf.Method):
    name: ClassVar[str] = "holding"
    what: object = None


def small_net(shape, num_classes):
    return nn.Linear(*shape, num_classes)


def split(seed):
    return hf.federate(DATA, hf.Dirichlet(1.0), clients=3, seed=seed)


def weights(run):
    return {name: value.tolist() for name, value in run.model.state_dict().items()}


def stop(record):
    if record["round"] == 1:
        raise KeyboardInterrupt


# Experiments ------------------------------------------------------------------------------------------------


def test_an_experiment_with_references_is_written_read_and_continued(code, tmp_path, monkeypatch):
    experiment = hf.Experiment(
        data=f"{code}:sites",
        method=f"fedntd+{code}:mu=0.3",
        model=f"{code}:net:width=5",
        checkpoint_seconds=0,
        **SHORT,
    )
    assert hf.Experiment.from_mapping(experiment.describe()) == experiment
    assert experiment.with_settings(["method.pull.mu=0.5"]).describe()["method"]["pull"]["mu"] == 0.5
    with pytest.raises(KeyboardInterrupt):
        experiment.run(tmp_path / "run", on_round=stop)
    monkeypatch.chdir("/")
    again = hf.Experiment.from_file(tmp_path / "run" / "experiment.yaml")
    run = again.run(tmp_path / "run", resume=True)
    assert [record["round"] for record in run.records] == [1, 2]
    assert weights(run) == weights(experiment.run())
    opened = hf.Run.open(tmp_path / "run")
    assert weights(opened) == weights(run)
    assert opened.experiment["method"]["pull"]["name"] == "code.py:Pull"


def test_objects_that_a_file_leads_to_are_recorded_by_it(tmp_path):
    experiment = hf.Experiment(data=split, method=hf.FedNTD() + Push(mu=0.01), model=small_net, **SHORT)
    run = experiment.run(tmp_path)
    again = hf.Experiment.from_file(tmp_path / "experiment.yaml")
    assert (
        replace(again, engine="auto", parallel_clients=None, task=None, metrics=None) == experiment
    )  # found
    assert again.make_method() == hf.FedNTD() + Push(mu=0.01)  # the same class, not that of a second module
    assert weights(hf.Run.open(tmp_path)) == weights(run)
    direct = hf.train(hf.FedNTD() + Push(mu=0.01), small_net, split(0), seed=0, **SHORT)
    assert weights(direct) == weights(run)


def test_objects_that_no_file_leads_to_are_trained_and_resumed_from_python_alone(tmp_path):
    @dataclass(frozen=True)
    class Local(hf.FedAvg):
        name: ClassVar[str] = "local"

    net = small_net((6,), 3)
    experiment = hf.Experiment(data=split(0), method=Local(), model=net, checkpoint_seconds=0, **SHORT)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(tmp_path, on_round=stop)
    run = experiment.run(tmp_path, resume=True)
    assert weights(run) == weights(hf.train(Local(), net, split(0), **SHORT))
    stored = RunDirectory.open(tmp_path).experiment
    assert stored["method"] == {"name": "local", "own": True}
    assert stored["model"] == {"name": "Linear", "own": True}
    assert stored["data"] == {"name": "sixes", "own": True}
    assert stored["clients"] == 3
    with pytest.raises(
        hf.HoldfastError, match=r"the data of this run is a Python object.*given as sites\.py:load"
    ):
        hf.Experiment.from_file(tmp_path / "experiment.yaml")


def test_a_data_set_is_shared_out_by_the_experiment():
    one = hf.Experiment(data=DATA, partition="iid", clients=3, **SHORT).build_federation()
    assert one.hash == hf.federate(DATA, hf.IID(), clients=3, seed=0).hash


def test_a_function_of_data_gets_the_seed_and_its_options(code):
    by_seed = hf.Experiment(data=f"{code}:sites", seed=4, partition_seed=2, **SHORT)
    assert by_seed.build_federation().hash == split(2).hash
    assert not by_seed.data_is_fixed
    of_60 = hf.Experiment(data=f"{code}:data:samples=60", clients=2, partition="iid", **SHORT)
    assert of_60.data_is_fixed
    assert of_60.build_federation().sizes().tolist() == [30, 30]
    assert hf.Experiment(data=f"{code}:whole", **SHORT).build_federation().clients == 3


@pytest.mark.parametrize("name", ["net", "net:width=7", "Net", "fixed"])
def test_every_way_of_giving_a_model(code, name):
    model = hf.parse_model(f"{code}:{name}")
    run = hf.train("fedavg", model, split(0), **SHORT)
    assert weights(hf.train("fedavg", f"{code}:{name}", split(0), **SHORT)) == weights(run)
    other = hf.train("fedavg", model, split(0), seed=1, **SHORT)
    differ = weights(other) != weights(run)
    assert differ
    # A function draws from the run's seed, and a module has its weights.
    same_start = all(
        torch.equal(a, b)
        for a, b in zip(
            model.build((6,), 3, 0).parameters(), model.build((6,), 3, 1).parameters(), strict=True
        )
    )
    assert same_start == (name == "fixed")


def test_an_own_model_is_checked_like_a_module(code):
    """Its unused parameters, its draws and its padding are found, as for a module that is given itself."""
    given = hf.train("fedavg", hf.parse_model(f"{code}:net").build((6,), 3, 0), split(0), **SHORT)
    assert weights(given) == weights(hf.train("fedavg", f"{code}:net", split(0), **SHORT))
    code.write_text(CODE + "\n\ndef none(shape):\n    return 3\n")
    with pytest.raises(
        hf.HoldfastError, match=r"code\.py:none returns a int; it must return a torch\.nn\.Module"
    ):
        hf.train("fedavg", f"{code}:none", split(0), **SHORT)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model": "CODE:nett"}, r"unknown name in .*code\.py 'nett'; did you mean net"),
        ({"model": "CODE:net:widht=3"}, r"unknown option of code\.py:net 'widht'; did you mean width"),
        (
            {"model": "CODE:Pull"},
            r"code\.py:Pull is the class Pull; it must be a function that returns a torch",
        ),
        ({"model": "CODE:fixed:width=3"}, r"code\.py:fixed is a module, which has no options"),
        (
            {"model": "CODE"},
            r"code\.py' has no model that can be selected without a name, such as code\.py:Pull",
        ),
        ({"model": "no.py:net"}, r"the file '.*no\.py' for the model does not exist.*net"),
        (
            {"model": lambda width: None},
            r"model is the function <lambda>, which requires .* those of the arguments shape, num_classes, seed",
        ),
        ({"model": 3}, "model is a int; it must be one of holdfast.models"),
        (
            {"data": "CODE:Net"},
            r"code\.py:Net is the class Net; it must be a function that returns a holdfast.Dataset",
        ),
        ({"data": "CODE:data:sampels=3"}, r"unknown option of code\.py:data 'sampels'; did you mean samples"),
        ({"data": "CODE:whole:x=1"}, r"code\.py:whole is an object, which has no options"),
        ({"data": 3}, r"data is a int; it must be the name of a data set, a path"),
        (
            {"data": lambda site: None},
            r"<lambda> needs site: besides seed, every argument must have a default",
        ),
        ({"data": hf.FedAvg()}, r"data is a FedAvg; it must be the name"),
        ({"method": Push}, r"method is the class Push; it must be an instance, such as Push\(\)"),
        (
            {"method": Holding(lambda: 3)},
            r"holding: what is the function <lambda>; the fields of a method are stored",
        ),
        ({"data": DATA, "model": DATA}, "model is a Dataset; it must be"),
    ],
)
def test_experiments_that_cannot_be(code, values, sentence):
    given = {k: v.replace("CODE", str(code)) if isinstance(v, str) else v for k, v in values.items()}
    with pytest.raises(hf.HoldfastError, match=sentence) as error:
        hf.Experiment(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"data": "CODE:broken"}, r"code\.py:broken fails: KeyError: 'site' \(line 51\)"),
        (
            {"data": "CODE:nothing"},
            r"code\.py:nothing returns a int; it must return a holdfast\.Dataset or a",
        ),
        (
            {"data": "CODE:sites", "clients": 4},
            r"clients is given together with code\.py:sites, a federation, which contains",
        ),
        (
            {"data": "CODE:whole", "partition_seed": 4},
            r"partition_seed is given together with code\.py:whole",
        ),
        ({"data": "CODE:whole", "federation": "f.json"}, r"federation is given together with code\.py:whole"),
        (
            {"data": "CODE:data", "preprocess": "fedntd", "clients": 2},
            r"preprocess is given together with code\.py:data",
        ),
    ],
)
def test_own_data_that_cannot_be(code, values, sentence):
    given = {k: v.replace("CODE", str(code)) if isinstance(v, str) else v for k, v in values.items()}
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.Experiment(**given).build_federation()


# Changed and missing files -----------------------------------------------------------------------------------


def test_a_changed_file_is_named_and_nothing_is_resumed(code, tmp_path):
    def run(**more):
        return hf.train(
            f"{code}:Pull",
            f"{code}:net",
            split(0),
            out=tmp_path / "run",
            **SHORT | {"checkpoint_seconds": 0} | more,
        )

    with pytest.raises(KeyboardInterrupt):
        run(on_round=stop)
    code.write_text(CODE.replace("0.1", "0.2"))
    with pytest.raises(
        hf.HoldfastError, match=rf"run cannot be resumed: {code} has changed since the run began"
    ):
        run(resume=True)
    code.write_text(CODE)
    finished = run(resume=True)
    assert weights(hf.Run.open(tmp_path / "run")) == weights(finished)
    code.write_text(CODE.replace("0.1", "0.2"))
    with pytest.raises(hf.HoldfastError, match=r"code\.py', which the model comes from, has changed since"):
        hf.Run.open(tmp_path / "run")
    with pytest.raises(hf.HoldfastError, match=r"code\.py', which the method comes from, has changed since"):
        hf.Experiment(method=finished.experiment["method"])
    code.unlink()
    with pytest.raises(hf.HoldfastError, match=r"the file '.*code\.py' for the model does not exist"):
        hf.Run.open(tmp_path / "run")
    moved = tmp_path / "moved"
    moved.mkdir()
    code = moved / "code.py"
    code.write_text(CODE)
    assert len(run(resume=True).records) == 2  # a file may move


def test_runs_from_before_own_code_was_recorded_go_on():
    method = {"name": "pull", "mu": 0.1, "own": True}
    now = {"name": "code.py:Pull", "mu": 0.1, "file": "/x/code.py", "sha256": "1"}
    refuse_change("run", {"method": method}, {"method": now})
    with pytest.raises(hf.HoldfastError, match="cannot be resumed with another method"):
        refuse_change("run", {"method": method}, {"method": now | {"mu": 0.2}})
    with pytest.raises(hf.HoldfastError, match="cannot be resumed with another method"):
        refuse_change("run", {"method": now}, {"method": method})


# Comparisons --------------------------------------------------------------------------------------------------


def test_any_objects_are_compared(code):
    methods = [hf.FedAvg(), Push(), Push(mu=0.2), hf.FedNTD(beta=2.0) + Push(), f"{code}:Pull"]
    found = hf.compare(methods, small_net, split, seeds=2, **SHORT)
    assert [row.method for row in found.rows] == [
        "fedavg", "push", "push:mu=0.2", "fedntd:beta=2.0+push", f"{code}:Pull",
    ]  # fmt: skip
    for method, row in zip([*methods[:4], hf.parse_method(f"{code}:Pull")], found.rows, strict=True):
        runs = [hf.train(method, small_net, split(seed), seed=seed, **SHORT) for seed in (0, 1)]
        assert row.accuracy == [run.accuracy for run in runs]
    assert found.rows[1].p_value is not None
    assert found.paths == []


def test_a_comparison_of_objects_is_read_and_continued(tmp_path):
    net, federation, told = small_net((6,), 3), split(0), []

    def compare(model=net, among=federation, **more):
        methods = {"plain": hf.FedAvg(), "ours (μ = 0.1)": Push()}
        settings = SHORT | {"checkpoint_seconds": 0.0} | more
        return hf.compare(
            methods,
            model,
            among,
            [0, 3],
            out=tmp_path,
            on_start=lambda *which: told.append(which),
            **settings,
        )

    def stop_second(record):
        if len(told) == 2 and record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(on_round=stop_second)
    rounds = []
    first = compare(on_round=lambda record: rounds.append(record["round"]))
    assert rounds == [2, 1, 2, 1, 2]
    told.clear()
    again = compare()
    assert told == []
    assert again.rows == first.rows
    assert [path.relative_to(tmp_path).as_posix() for path in again.paths] == [
        "plain/seed-0", "ours--μ-=-0.1-/seed-0", "plain/seed-3", "ours--μ-=-0.1-/seed-3",
    ]  # fmt: skip
    assert json.loads((tmp_path / "comparison.json").read_text()) == {"baseline": "plain"}
    for changes, sentence in (
        ({"lr": 0.2}, r"another lr: 0\.1, not 0\.2"),
        ({"among": split(1)}, "another federation"),
        ({"model": nn.Sequential(nn.Linear(6, 3))}, "another model"),
        ({"model": nn.Linear(6, 3, bias=False)}, "another model"),
    ):
        with pytest.raises(hf.HoldfastError, match=sentence):
            compare(**changes)


def test_a_comparison_with_references_refuses_a_changed_file(code, tmp_path):
    def compare():
        return hf.compare([f"{code}:Pull"], "linear", f"{code}:sites", 1, out=tmp_path / "all", **SHORT)

    first = compare()
    assert compare().rows == first.rows
    code.write_text(CODE.replace("0.1", "0.2"))
    with pytest.raises(
        hf.HoldfastError, match=rf"holds a run with an earlier version of {code}; choose another --out"
    ):
        compare()


@pytest.mark.parametrize(
    ("methods", "changes", "sentence"),
    [
        ([Push(), Push()], {}, "a method is named twice: push"),
        (["fedavg", hf.FedAvg()], {}, "a method is named twice: fedavg"),
        ([Push], {}, "method is the class Push"),
        ([Push(), 3], {}, "method is a int"),
        ("fedavg", {}, "methods is a str; it must be a list"),
        (hf.FedAvg(), {}, r"methods is a FedAvg; .* \[holdfast\.FedAvg\(\)"),
        (
            {"a b": Push(), "a-b": hf.FedAvg()},
            {},
            r"'a b' and 'a-b' have the same name; give them labels",
        ),
        ({"": Push()}, {}, "the label '' of a method must be text"),
        (["fedavg"], {"round": 3}, "unknown setting 'round'; did you mean rounds"),
        (["fedavg"], {"method": "fedavg"}, "unknown setting 'method'"),
        (["fedavg"], {"federation": None}, r"a comparison needs a federation, from holdfast\.federate"),
        (["fedavg"], {"federation": 3}, "data is a int; it must be"),
        (["fedavg"], {"seeds": "3"}, "seeds is '3'; it must be a number of seeds, or a list"),
        (["fedavg"], {"seeds": [1, 1]}, "a seed is given twice: 1, 1"),
        (["fedavg"], {"seeds": [0.5]}, "a seed is 0.5; it must be a whole number"),
    ],
)
def test_comparisons_of_objects_that_cannot_be_made(methods, changes, sentence):
    given = {"model": "linear", "federation": split} | SHORT | changes
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.compare(methods, **given)


def test_settings_beside_an_experiment_are_refused():
    with pytest.raises(
        hf.HoldfastError, match="lr is given together with an Experiment, which contains it already"
    ):
        hf.compare(["fedavg"], hf.Experiment(data=split), 1, lr=0.1)
    found = hf.compare(
        {"one": "fedavg"}, hf.Experiment(data=DATA, model="linear", clients=3, **SHORT), seeds=1
    )
    assert found.rows[0].method == "one"
