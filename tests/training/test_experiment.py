"""Experiments as files and as text."""

from pathlib import Path

import numpy as np
import pytest
import yaml

import holdfast as hf
from holdfast.training.experiment import RECORDED

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_text_and_mapping_say_the_same():
    text = hf.Experiment(
        clients=10,
        method="fedntd:beta=0.5",
        model="mlp:64,32",
        partition="dirichlet:0.1,min_size=1",
        stream="3",
    )
    mapping = hf.Experiment(
        clients=10,
        method={"name": "fedntd", "beta": 0.5, "tau": 1.0},
        model={"name": "mlp", "hidden": [64, 32]},
        partition={"name": "dirichlet", "alpha": 0.1, "min_size": 1},
        stream={"tasks_per_client": 3},
    )
    assert text == mapping
    assert hf.Experiment.from_mapping(text.describe()) == text
    assert hf.Experiment.from_mapping(yaml.safe_load(yaml.safe_dump(text.describe()))) == text


def test_options_may_hold_lists():
    text = hf.Experiment(stream="2,stage_classes=[[0, 1],[2]],joins=[0,1],cumulative=true")
    assert text.stream == {
        "tasks_per_client": 2,
        "stage_classes": [[0, 1], [2]],
        "joins": [0, 1],
        "cumulative": True,
    }


def test_a_file_with_everything_a_run_recorded():
    written = hf.Experiment(clients=3).describe() | {key: "whatever" for key in RECORDED}
    assert hf.Experiment.from_mapping(written) == hf.Experiment(clients=3)


def test_settings_are_changed_by_their_paths():
    one = hf.Experiment(clients=10, method="fedntd+fedprox")
    changed = one.with_settings(
        ["method.fedntd.beta=0.5", "lr=1e-3", "clients_per_round=4", "partition.alpha=2", "skew.blur=1"]
    )
    assert changed.describe()["method"]["fedntd"]["beta"] == 0.5
    assert changed.describe()["method"]["fedprox"] == one.describe()["method"]["fedprox"]
    assert changed.lr == 1e-3
    assert changed.clients_per_round == 4
    assert changed.describe()["partition"]["alpha"] == 2.0
    assert changed.describe()["skew"] == {"blur": 1}
    assert one.lr == 0.1


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"metod": "fedavg"}, "unknown setting 'metod'; did you mean method"),
        ({"method": "fedntt"}, "unknown method 'fedntt'; did you mean fedntd"),
        ({"method": "fedntd:betta=1"}, "unknown option of fedntd 'betta'; did you mean beta"),
        ({"method": "fedntd:beta=much"}, "beta is 'much'; it must be a number"),
        ({"partition": "dirichlett:0.1"}, "unknown partition 'dirichlett'; did you mean dirichlet"),
        ({"partition": "dirichlet:-1"}, "alpha"),
        ({"model": "resnet19"}, "unknown model 'resnet19'; did you mean resnet18"),
        ({"rounds": "ten"}, "rounds is 'ten'; it must be a whole number"),
        ({"rounds": 1.5}, "rounds is 1.5; it must be a whole number"),
        ({"lr": "fast"}, "lr is 'fast'; it must be a number"),
        ({"evaluate_locals": 1}, "evaluate_locals is 1; it must be true or false"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"skew": "rotate=3"}, "unknown option of skew 'rotate'; did you mean rotation"),
        ({"stream": "five"}, "number of tasks for each client"),
        ({"stream": "5,chunks=maybe"}, "chunks of a stream must be true or false, not 'maybe'"),
        ({"stream": "5,cumul=true"}, "unknown option of stream 'cumul'; did you mean cumulative"),
        ({"data": ["a"]}, "data is"),
        ({"federation": "f.json", "clients": 3}, "clients is given together with a federation file"),
        ({"data": {"name": "mine", "own": True}}, "the data of this run is a Python object"),
        ({"partition": {"name": "given"}}, "the partition of this run is a Python object"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(values, sentence):
    with pytest.raises(hf.HoldfastError, match=sentence) as error:
        hf.Experiment.from_mapping(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"data": "cifar11", "clients": 2}, "unknown data set 'cifar11'; did you mean cifar10"),
        ({"clients": 5000}, "5000"),
        ({"clients": 7, "partition": "class-shards:3"}, "cannot be shared equally by 10 classes"),
        ({"partition": "iid"}, "needs the number of clients"),
        ({"clients": 10, "long_tail": 1.5}, "ratio is 1.5; it must be above 0"),
        (
            {"clients": 2, "preprocess": {"men": [0.5]}},
            "unknown option of preprocess 'men'; did you mean mean",
        ),
        ({"clients": 2, "preprocess": "fedavg"}, "unknown preprocessing preset 'fedavg'"),
        ({"federation": "nowhere.json"}, "cannot read the federation 'nowhere.json'"),
        ({"clients": 2, "stream": "2,schedule=sometimes"}, "unknown stage schedule 'sometimes'"),
    ],
)
def test_federations_that_cannot_be_made(values, sentence):
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.Experiment.from_mapping(values).build_federation()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n- 2\n", "does not describe an experiment"),
        (b"\xff\xfe\x00", "is not YAML"),
    ],
)
def test_files_that_are_no_experiment(tmp_path, text, sentence):
    path = tmp_path / "e.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.Experiment.from_file(path)
    with pytest.raises(hf.HoldfastError, match="No such file"):
        hf.Experiment.from_file(tmp_path / "none.yaml")


def test_the_partition_follows_the_seed_unless_it_has_its_own():
    hashes = [hf.Experiment(clients=5, seed=seed).build_federation().hash for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]
    fixed = {
        hf.Experiment(clients=5, seed=seed, partition_seed=0).build_federation().hash for seed in (0, 1, 2)
    }
    assert fixed == {hashes[0]}
    assert hashes[0] == hf.federate(hf.load("digits"), hf.Dirichlet(0.1), clients=5, seed=0).hash


def test_every_way_of_holding_data_reaches_the_federation():
    one = hf.Experiment(
        clients=4, partition="iid", public=0.1, long_tail=0.2, stream="2,cumulative=true,schedule=every-n:3"
    ).build_federation()
    direct = hf.stream(
        hf.load("digits"),
        hf.IID(),
        clients=4,
        tasks_per_client=2,
        cumulative=True,
        public=0.1,
        long_tail=hf.LongTail(0.2),
        schedule=hf.EveryN(3, 2),
    )
    assert one.hash == direct.hash
    assert one.schedule == direct.schedule
    skewed = hf.Experiment(clients=4, partition="iid", skew="rotation=30").build_federation()
    assert "domain" in skewed.dataset.groups


def test_own_files_stay_found_from_elsewhere(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 4)).astype(np.float32), rng.integers(0, 2, 80)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    monkeypatch.chdir(tmp_path)
    one = hf.Experiment(data="own.npz", clients=2, partition="iid", model="linear", rounds=1)
    one.build_federation().save("who.json")
    kept = hf.Experiment(data="own.npz", federation="who.json", model="linear", rounds=1)
    run = kept.run(tmp_path / "run")
    monkeypatch.chdir("/")
    again = hf.Experiment.from_file(tmp_path / "run" / "experiment.yaml")
    assert (
        again.build_federation().hash
        == run.experiment["hash"]
        == one.with_settings([]).build_federation().hash
    )


def test_an_unknown_domain_is_told_before_any_is_loaded(monkeypatch):
    monkeypatch.setattr("holdfast.data.sources.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(hf.HoldfastError, match="unknown data set 'uspss'; did you mean usps"):
        hf.Experiment(data="mixed-digits:mnist,uspss").load_data()


def test_preprocessing_by_name_and_by_value():
    plain = hf.Experiment(clients=2).load_data().preprocess
    assert plain == hf.preprocess_for("digits")
    own = {"mean": [0.5], "std": [0.25], "flip": True}
    assert hf.Experiment(clients=2, preprocess=own).load_data().preprocess == hf.Preprocess(
        (0.5,), (0.25,), flip=True
    )


def test_the_example_is_an_experiment():
    example = hf.Experiment.from_file(EXAMPLES / "experiment.yaml")
    assert example.describe()["method"]["name"] == "fedntd"


def test_a_key_given_twice_is_refused(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text("rounds: 3\nmethod: {name: fedntd}\nlr: 0.1\nrounds: 4\n")
    with pytest.raises(hf.HoldfastError, match="'rounds' is given twice, the second time in line 4"):
        hf.Experiment.from_file(file)
    file.write_text("lr: yes\n")
    with pytest.raises(hf.HoldfastError, match="lr is 'yes'; it must be a number"):
        hf.Experiment.from_file(file)
