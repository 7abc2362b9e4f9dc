"""Real federations: readers on small files in the published format, and the published sizes on the real ones."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import yaml
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.core.errors import HoldfastError
from holdfast.data.sources import DATASETS, default_partition, describe, load
from holdfast.training.experiment import Experiment

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NAMES = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target\n"


def without_md5(source):
    layouts = tuple(
        replace(one, files=tuple(replace(file, md5=None) for file in one.files)) for one in source.layouts
    )
    return replace(source, layouts=layouts)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    for name in ("heart-disease", "tcga-brca", "shakespeare"):
        monkeypatch.setitem(DATASETS, name, without_md5(DATASETS[name]))
    return tmp_path


def patients(hospital, rows, ill=None):
    """Rows of the published columns; every seventh patient lacks cholesterol, all lack the columns 10 to 12."""
    rng = np.random.default_rng(hospital)
    x = np.stack([
        rng.integers(30, 70, rows), rng.integers(0, 2, rows), rng.integers(1, 5, rows), rng.integers(90, 160, rows),
        rng.integers(150, 300, rows), rng.integers(0, 2, rows), rng.integers(0, 3, rows), rng.integers(90, 190, rows),
        rng.integers(0, 2, rows), rng.integers(0, 5, rows), *np.zeros((3, rows), int),
        rng.integers(0, 5, rows) if ill is None else np.full(rows, ill),
    ], 1)  # fmt: skip
    return x


def write_hospitals(folder, tables, first_line=""):
    folder.mkdir(parents=True)
    for name, table in zip(HOSPITALS, tables, strict=True):
        lines = []
        for number, row in enumerate(table):
            cells = [str(value) for value in row]
            cells[10:13] = "???"
            if number % 7 == 6:
                cells[4] = "?"
            lines.append(",".join(cells) + "\n")
        (folder / f"processed.{name}.data").write_text(first_line + "".join(lines))


def kaggle(table):
    """Cleveland's patients in the codes of the copy on Kaggle."""
    table = table.copy()
    table[:, 2] = [{4: 0, 2: 1, 3: 2, 1: 3}[code] for code in table[:, 2]]
    table[:, 6] = [{2: 0, 0: 1, 1: 2}[code] for code in table[:, 6]]
    table[:, -1] = table[:, -1] == 0
    return table


TABLES = [patients(0, 40), patients(1, 30), patients(2, 20, ill=1), patients(3, 14)]


def test_heart_disease(root):
    write_hospitals(root / "heart-disease", TABLES)
    data = load("heart-disease", root=root)
    site = data.groups["site"]
    assert (site.names, data.classes, data.task.name) == (HOSPITALS, ("healthy", "ill"), "binary")
    for hospital, table in enumerate(TABLES):
        table = table[np.arange(len(table)) % 7 != 6]
        y = (table[:, -1] > 0).astype(int)
        train, test = train_test_split(
            np.arange(len(y)),
            test_size=1 - 0.66,
            train_size=0.66,
            random_state=43,
            stratify=y if min(np.bincount(y, minlength=2)) > 2 else None,
        )
        train, test = sorted(train), sorted(test)
        indicators = [table[:, 2] == code for code in (2, 3, 4)] + [table[:, 6] == code for code in (1, 2)]
        x = np.stack([*table[:, [0, 1, 3, 4, 5, 7, 8, 9]].T, *indicators], 1).astype(float)
        mean, deviation = x[train].mean(0), x[train].std(0, ddof=1)
        expected = (x - mean) / np.where(deviation == 0, 1, deviation)
        np.testing.assert_allclose(data.x_train[site.train == hospital], expected[train], atol=1e-6)
        np.testing.assert_allclose(data.x_test[site.test == hospital], expected[test], atol=1e-6)
        assert data.y_train[site.train == hospital].tolist() == y[train].tolist()
        assert data.y_test[site.test == hospital].tolist() == y[test].tolist()


def test_heart_disease_with_names_and_the_other_codes_of_cleveland(root):
    write_hospitals(root / "one/heart-disease", TABLES)
    write_hospitals(
        root / "other/federations/heart-disease", [kaggle(TABLES[0]), *TABLES[1:]], "\ufeff" + NAMES
    )
    one, other = (load("heart-disease", root=root / folder) for folder in ("one", "other"))
    np.testing.assert_array_equal(one.x_train, other.x_train)
    assert one.y_test.tolist() == other.y_test.tolist()


def test_tcga_brca(root):
    rng = np.random.default_rng(0)
    folder = root / "federations/tcga-brca"
    folder.mkdir(parents=True)
    x, event, time = rng.integers(0, 90, (30, 39)), rng.integers(0, 2, 30), rng.integers(0, 3000, 30)
    header = ",".join(["pid", *(f'"feature, {i}"' for i in range(39)), "E", "T"])
    rows = [f"p{i},{','.join(map(str, x[i]))},{event[i]}.0,{time[i]}.0" for i in range(30)]
    (folder / "brca.csv").write_text("\n".join([header, *rows]) + "\n")
    folds = [
        f"p{i},{'test' if i % 5 == 4 else 'train'},{'test' if i % 5 == 4 else 'train'}_{i % 6}"
        for i in range(28)
    ]
    (folder / "train_test_split.csv").write_text("\n".join(["pid,fold,fold2", *reversed(folds)]) + "\n")
    data = load("tcga-brca", root=root)
    site = data.groups["site"]
    assert site.names == ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
    assert data.task.name == "survival"
    for region in range(6):
        ids = [i for i in range(28) if i % 6 == region]
        train, test = [i for i in ids if i % 5 != 4], [i for i in ids if i % 5 == 4]
        assert data.x_train[site.train == region].tolist() == x[train].tolist()
        assert (
            data.y_train[site.train == region].tolist() == np.stack([time[train], event[train]], 1).tolist()
        )
        assert data.x_test[site.test == region].tolist() == x[test].tolist()


def test_shakespeare(root):
    folder = root / "shakespeare"
    folder.mkdir()
    long, short = "ab cd\n" * 80, "too little"
    (folder / "input.txt").write_text(
        f"First Citizen:\n{long}\nAll:\n{short}\n\nFirst Citizen:\nand more: yes\n"
    )
    data = load("shakespeare", root=root)
    assert data.groups["site"].names == ("First Citizen",)
    assert data.task.name == "sequence"
    characters = sorted(set(f"First Citizen:\n{long}All{short}and more: yes"))
    assert data.labels == tuple(map(repr, characters))
    spoken = long.strip("\n") + "\nand more: yes"
    windows = (len(spoken) - 1) // 80
    tests = round(windows / 5)
    x, y = (
        ["".join(characters[code] for code in row) for part in parts for row in part.tolist()]
        for parts in ((data.x_train, data.x_test), (data.y_train, data.y_test))
    )
    assert x == [spoken[80 * i : 80 * i + 80] for i in range(windows)]
    assert y == [spoken[80 * i + 1 : 80 * i + 81] for i in range(windows)]
    assert len(data.x_test) == tests


@pytest.mark.parametrize(
    ("name", "file", "text", "words"),
    [
        ("heart-disease", "processed.va.data", "1,2\n3\n", "heart-disease/processed.va.data"),
        (
            "heart-disease",
            "processed.va.data",
            "1,x\n",
            "does not have the published content: could not convert",
        ),
        ("tcga-brca", "brca.csv", "pid,E,T\np0,1\n", "the tcga-brca files in .* cannot be read"),
        ("shakespeare", "input.txt", "All:\nhi\n", "has no speaker with at least 161 characters"),
    ],
)
def test_damaged_files(root, name, file, text, words):
    folder = root / name
    if name == "heart-disease":
        write_hospitals(folder, TABLES)
    folder.mkdir(exist_ok=True)
    (folder / "train_test_split.csv").write_text("pid,fold,fold2\n")
    (folder / file).write_text(text)
    with pytest.raises(HoldfastError, match=words):
        load(name, root=root)


def test_every_site_is_a_client_by_default(root, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DATA", str(root))
    write_hospitals(root / "heart-disease", TABLES)
    federation = Experiment(data="heart-disease").build_federation()
    names, of_clients = federation.client_domains()
    assert [names[k] for k in of_clients] == list(HOSPITALS)
    assert (default_partition("heart-disease"), default_partition("digits")) == ("by-site", "dirichlet:0.1")
    assert Experiment(data="heart-disease", partition="iid", clients=3).build_federation().clients == 3


realdata = pytest.mark.skipif("HOLDFAST_DATA" not in os.environ, reason="needs data sets in HOLDFAST_DATA")


@pytest.mark.realdata
@realdata
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("heart-disease", [199, 172, 30, 85], [104, 89, 16, 45]),
        ("tcga-brca", [248, 156, 164, 129, 129, 40], [63, 40, 42, 33, 33, 11]),
        ("shakespeare", None, None),
    ],
)
def test_the_real_files_have_the_published_sizes(name, train, test):
    row = next(row for row in describe() if row["name"] == name)
    if not row["found"]:
        pytest.skip(row["missing"])
    data, source = load(name, download=False), DATASETS[name]
    assert (len(data.y_train), len(data.y_test), data.shape) == (source.train, source.test, source.shape)
    site = data.groups["site"]
    if train is not None:
        assert [np.bincount(site.train).tolist(), np.bincount(site.test).tolist()] == [train, test]


@pytest.mark.realdata
@realdata
def test_hospitals_agree_on_who_is_ill():
    """Exercise angina and age raise the risk at each hospital, so its labels have one meaning everywhere."""
    if not next(row for row in describe() if row["name"] == "heart-disease")["found"]:
        pytest.skip("no heart-disease in HOLDFAST_DATA")
    data = load("heart-disease", download=False)
    site = data.groups["site"].train
    for hospital in (0, 1, 3):
        x, y = data.x_train[site == hospital].numpy(), data.y_train[site == hospital].numpy()
        assert roc_auc_score(y, x[:, 0]) > 0.5
        assert roc_auc_score(y, x[:, 6]) > 0.5


@pytest.mark.realdata
@realdata
@pytest.mark.parametrize(
    ("command", "metrics", "task"),
    [
        (
            "--data heart-disease --method fedavg --model linear --optimizer adam --rounds 5",
            ["auroc", "accuracy"],
            "binary",
        ),
        (
            "--data tcga-brca --method fedavg --model linear --optimizer adam --rounds 2",
            ["concordance"],
            "survival",
        ),
    ],
)
def test_the_command_as_it_is_written(command, metrics, task, tmp_path):
    name = command.split()[1]
    if not next(row for row in describe() if row["name"] == name)["found"]:
        pytest.skip(f"no {name} in HOLDFAST_DATA")
    done = CliRunner().invoke(app, ["run", *command.split(), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    experiment = yaml.safe_load((tmp_path / "run" / "experiment.yaml").read_text())
    assert experiment["task"]["name"] == task
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    sites = list(HOSPITALS) if name == "heart-disease" else list(record[f"site_{metrics[0]}"])
    assert sorted(record["participants"]) == list(range(4 if name == "heart-disease" else 6))
    for metric in metrics:
        assert 0 < record[metric] < 1
        assert list(record[f"site_{metric}"]) == sites
        assert metric in done.output
