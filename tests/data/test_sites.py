"""Federations from data at several sites: one client each, statistics gathered by site, sentences for what differs."""

import re
import warnings

import numpy as np
import pytest
import torch
import yaml
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.data.dataset import Dataset
from holdfast.data.sites import concatenate, federation_from_sites
from holdfast.training.train import train

TOWNS = ("paris", "lyon", "nice")


def clinic(site, rows):
    rng = np.random.default_rng(site)
    return {
        "age": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(50 + 9 * site, 10, rows)),
        "sex": rng.choice(["f", "m", None], rows).tolist(),
        "unit": rng.choice(["a", "b", "c"][: site + 1], rows).tolist(),
        "ill": (rng.random(rows) < 0.4).astype(int),
    }


def clinics():
    return {
        town: clinic(site, rows) for site, (town, rows) in enumerate(zip(TOWNS, (30, 20, 12), strict=True))
    }


def write_csv(path, columns):
    lines = [
        ",".join("" if v is None or v != v else str(v) for v in row)
        for row in zip(*columns.values(), strict=True)
    ]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")


def assert_same(one, other):
    for part in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(one.dataset, part), getattr(other.dataset, part))
    assert one.hash == other.hash


def test_a_site_without_the_first_class_is_not_reported():
    x, y = np.ones((20, 3), np.float32), np.arange(20) % 3
    with warnings.catch_warnings(action="error"):
        federation_from_sites({"a": (x, np.maximum(y, 1)), "b": (x, y)})
    with pytest.warns(HoldfastWarning, match="the labels begin at 1") as seen:
        federation_from_sites({"a": (x, np.maximum(y, 1)), "b": (x, np.maximum(y, 1))})
    assert len(seen) == 1


def test_sites_without_test_samples_train_on_validation_samples():
    federation = federation_from_sites(clinics(), target="ill", test=0)
    assert not len(federation.dataset.y_test)
    assert len(federation.dataset.y_train) == sum(
        len(next(iter(site.values()))) for site in clinics().values()
    )
    options = {"rounds": 2, "lr": 0.1, "progress": False}
    with pytest.raises(
        HoldfastError, match="has no test samples, and no client has validation samples; give test"
    ):
        train("fedavg", "linear", federation, **options)
    run = train("fedavg", "linear", federation, **options, validation=0.3)
    assert not run.experiment["evaluate_locals"]
    with pytest.raises(HoldfastError, match="this run has no test on a test set"):
        run.class_accuracy
    assert run.domain_accuracy == {}
    assert "accuracy" not in run.records[-1]
    assert 0 <= run.records[-1]["validation"]["accuracy"] <= 1


def test_every_site_is_a_client_with_its_own_test_rows():
    federation = federation_from_sites(clinics(), target="ill")
    data, site = federation.dataset, federation.dataset.groups["site"]
    assert site.names == TOWNS
    assert np.bincount(site.train).tolist() == federation.sizes().tolist()
    assert [len(federation.client(k)) + (site.test == k).sum() for k in range(3)] == [30, 20, 12]
    for k in range(3):
        assert (site.train[federation.client(k)] == k).all()
    assert federation.partition["name"] == "by-site"
    assert data.classes == ("0", "1")
    names, of_clients = federation.client_domains()
    assert [names[k] for k in of_clients] == list(TOWNS)


def test_a_site_draws_its_test_rows_whatever_the_others_are():
    three = federation_from_sites(clinics(), target="ill")
    two = federation_from_sites({town: clinics()[town] for town in TOWNS[:2]}, target="ill")
    assert two.dataset.y_test.tolist() == three.dataset.y_test[three.dataset.groups["site"].test < 2].tolist()


def test_encoding_is_that_of_scikit_learn_fitted_on_all_training_rows():
    folds = {
        town: {**columns, "fold": np.arange(len(columns["ill"])) % 4 == 0}
        for town, columns in clinics().items()
    }
    federation = federation_from_sites(folds, target="ill", test="fold")
    pooled = {name: [v for columns in folds.values() for v in columns[name]] for name in folds["paris"]}
    rows = np.empty((62, 3), object)
    for position, name in enumerate(("age", "sex", "unit")):
        rows[:, position] = [np.nan if v is None else v for v in pooled[name]]
    train = ~np.array(pooled["fold"])
    reference = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), [0]),
            (
                "texts",
                make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(sparse_output=False)),
                [1, 2],
            ),
        ]
    ).fit(rows[train])
    np.testing.assert_allclose(federation.dataset.x_train, reference.transform(rows[train]), atol=1e-6)
    np.testing.assert_allclose(federation.dataset.x_test, reference.transform(rows[~train]), atol=1e-6)
    assert federation.dataset.y_test.tolist() == np.array(pooled["ill"])[~train].tolist()


def test_tables_of_every_kind(tmp_path):
    given = clinics()
    folder = tmp_path / "clinics"
    folder.mkdir()
    for town, columns in given.items():
        write_csv(folder / f"{town}.csv", columns)
    (folder / ".hidden").touch()
    (folder / "notes.txt").touch()
    files = {town: folder / f"{town}.csv" for town in TOWNS}
    by_file = federation_from_sites(files, target="ill")
    assert_same(
        by_file, federation_from_sites({town: str(path) for town, path in files.items()}, target="ill")
    )
    np.testing.assert_allclose(
        by_file.dataset.x_train, federation_from_sites(given, target="ill").dataset.x_train, atol=1e-6
    )
    by_folder = federation_from_sites(folder, target="ill")
    assert by_folder.dataset.groups["site"].names == ("lyon", "nice", "paris")
    assert by_folder.dataset.name == "clinics"
    assert_same(by_folder, federation_from_sites({town: files[town] for town in sorted(TOWNS)}, target="ill"))


def test_pairs_of_training_and_test_tables():
    given = clinics()
    pairs = {town: (given[town], clinic(9, 5)) for town in TOWNS}
    federation = federation_from_sites(pairs, target="ill")
    assert federation.sizes().tolist() == [30, 20, 12]
    assert len(federation.dataset.y_test) == 15


def arrays(site, rows, width=4):
    rng = np.random.default_rng(site)
    return rng.normal(size=(rows, width)), rng.integers(0, 3, rows)


class Items:
    """A map-style data set, as torch's."""

    def __init__(self, x, y):
        self.x, self.y = torch.tensor(x), y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


def test_arrays_of_every_kind(tmp_path):
    x, y = arrays(0, 20)
    np.savez(tmp_path / "d.npz", x_train=x[:15], y_train=y[:15], x_test=x[15:], y_test=y[15:])
    federation = federation_from_sites(
        {
            "drawn": (x, y),
            "given": (x[:15], y[:15], x[15:], y[15:]),
            "tensors": (torch.tensor(x), torch.tensor(y)),
            "items": Items(x, y),
            "dataset": Dataset.from_arrays(x[:15], y[:15], x[15:], y[15:]),
            "file": str(tmp_path / "d.npz"),
        },
        test=0.25,
    )
    assert federation.clients == 6
    sizes, site = federation.sizes(), federation.dataset.groups["site"]
    assert sizes[[1, 4, 5]].tolist() == [15, 15, 15]
    assert sizes[0] == sizes[2] == sizes[3]
    drawn = federation.dataset.x_train[federation.client(0)]
    assert {tuple(row) for row in drawn.tolist()} < {tuple(row) for row in torch.tensor(x).float().tolist()}
    assert np.bincount(site.test)[[1, 4, 5]].tolist() == [5, 5, 5]


def test_image_folders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for town, classes in (("oslo", ("cat", "dog")), ("bern", ("dog", "eel"))):
        for name in classes:
            for number in range(5):
                path = tmp_path / town / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.fromarray(np.full((4, 4), 10 * len(name) + number, np.uint8)).save(path)
    federation = federation_from_sites(tmp_path)
    assert federation.dataset.classes == ("cat", "dog", "eel")
    assert federation.dataset.groups["site"].names == ("bern", "oslo")
    assert federation.label_counts().tolist() == [[0, 4, 4], [4, 4, 0]]
    assert federation_from_sites(tmp_path, test=0.4).label_counts().tolist() == [[0, 3, 3], [3, 3, 0]]
    with pytest.raises(HoldfastError, match="test is -1; it must be a share"):
        federation_from_sites(tmp_path, test=-1)


def test_classes_are_matched_by_name():
    one = Dataset.from_arrays(np.zeros((2, 3)), [0, 1], np.zeros((1, 3)), [1], classes=["ill", "well"])
    other = Dataset.from_arrays(np.ones((2, 3)), [0, 1], np.ones((1, 3)), [0], classes=["well", "dead"])
    merged = concatenate({"a": one, "b": other})
    assert merged.classes == ("dead", "ill", "well")
    assert merged.y_train.tolist() == [1, 2, 2, 0]
    assert merged.y_test.tolist() == [2, 2]


def without(name, town="lyon"):
    sites = clinics()
    del sites[town][name]
    return sites


def changed(name, values, town="lyon"):
    sites = clinics()
    sites[town][name] = values
    return sites


TABLES = {"target": "ill"}
X, Y = arrays(0, 10)


@pytest.mark.parametrize(
    ("sites", "options", "words"),
    [
        (clinics(), {}, "name the target column of site 'paris', such as target='ill'"),
        (clinics(), TABLES | {"categorial": ["age"]}, "unknown option of tables 'categorial'; did you mean"),
        (clinics(), {"target": "sick"}, "unknown column of site 'paris' 'sick'; known: age, ill, sex, unit"),
        (without("ill"), TABLES, "site 'lyon' has no column 'ill', unlike site 'paris'; the columns of all"),
        (changed("weight", np.ones(20)), TABLES, "site 'lyon' has the columns 'weight', unlike site 'paris'"),
        (changed("age", ["x"] * 20), TABLES, "column 'age' holds 'x' in row"),
        (changed("age", ["x"] * 20), TABLES, "of site 'lyon', where other values are numbers"),
        (changed("ill", [None] * 20), TABLES, "the target 'ill' is missing in row 0 of site 'lyon'"),
        (changed("age", np.ones(3)), TABLES, "the columns of site 'lyon' have 3 to 20 rows"),
        (clinics() | {"metz": {k: [] for k in clinics()["lyon"]}}, TABLES, "site 'metz' has no rows; leave the"),
        ({1: clinic(0, 9), "1": clinic(1, 9)}, TABLES, "two sites are called '1'; their names must differ"),
        ({}, TABLES, "there are no sites; a federation needs at least one"),
        ([clinic(0, 9)], TABLES, "sites is a list; it must map the names of sites to their data"),
        ("nowhere/", TABLES, "there is no folder 'nowhere' of sites"),
        (clinics() | {"metz": (X, Y)}, TABLES, "site 'paris' is a table, site 'metz' is not; the data of all"),
        ({"a": (X, Y)}, TABLES, "target is an option for tables, but the sites' data are not tables"),
        ({"a": (X, Y)}, {"drop": ["x"]}, "drop is an option for tables"),
        ({"a": (X, Y)}, {"test": "fold"}, "test is 'fold'; for data other than tables it must be a share"),
        ({"a": (X, Y)}, {"test": 2}, "site 'a': test is 2; it must be a share of at least 0 and below 1"),
        ({"a": (X, Y[:3])}, {}, "site 'a': x has 10 samples, but y has 3 targets"),
        ({"a": (X, Y), "b": (X[:, :3], Y)}, {}, "site 'a' has samples of shape (4,), site 'b' (3,); they must be"),
        ({"a": (X, Y), "b": ((X * 9).astype(int), Y)}, {}, "samples of type torch.float32, site 'b' torch.int64"),
        ({"a": (X[:0], Y[:0])}, {}, "site 'a': there are no samples to draw a test share from"),
        ({"a": (X[:1], Y[:1])}, {}, "site 'a': samples are too few (1) to draw a test share from"),
        ({"a": 5}, {}, "site 'a': its data is a int; it must be a table, (x, y)"),
        ({"a": "b.txt"}, {}, "site 'a': 'b.txt' is neither a .csv, .tsv, .parquet or .npz file nor a folder of images"),
        ({"a": ["x", "y", "z"]}, {}, "site 'a': item 0 of the data set is a str; it must be a pair (sample, target)"),
    ],
)  # fmt: skip
def test_bad_input(sites, options, words):
    with pytest.raises(HoldfastError, match=re.escape(words)):
        federation_from_sites(sites, **options)


def test_two_files_of_one_site(tmp_path):
    write_csv(tmp_path / "paris.csv", clinic(0, 9))
    write_csv(tmp_path / "paris.tsv", clinic(1, 9))
    with pytest.raises(
        HoldfastError, match=r"'paris.csv' and 'paris.tsv' in .* both belong to the site 'paris'"
    ):
        federation_from_sites(tmp_path, target="ill")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(HoldfastError, match=r"empty contains no sites; each site must be a .csv"):
        federation_from_sites(empty, target="ill")


def test_a_class_that_no_training_row_has():
    train, test = clinic(0, 9), clinic(1, 3) | {"ill": [0, 1, 2]}
    with pytest.raises(
        HoldfastError, match="the target 'ill' is '2' in row 2 of site 'a', which no training row has"
    ):
        federation_from_sites({"a": (train, test)}, target="ill")


def test_the_encoder_is_recorded_with_a_run(tmp_path):
    federation = federation_from_sites(clinics(), target="ill")
    run = train("fedavg", "linear", federation, rounds=1, out=tmp_path / "run")
    recorded = yaml.safe_load((tmp_path / "run" / "experiment.yaml").read_text())["encoder"]
    assert recorded == run.experiment["encoder"] == federation.dataset.encoder.describe()
    assert recorded["columns"] == ["age", "sex", "unit"]
    assert "StandardScaler" in recorded["transformer"]
