"""Data sets from tables: columns, targets, shares for testing, and the sentences for what does not fit."""

import re

import numpy as np
import pytest
import torch
from sklearn.preprocessing import MinMaxScaler, QuantileTransformer, StandardScaler

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.data.dataset import Dataset
from holdfast.data.federation import federate


def patients(rows=40, seed=0, **changes):
    rng = np.random.default_rng(seed)
    columns = {
        "id": [f"p{seed}-{row}" for row in range(rows)],
        "age": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(50, 10, rows)),
        "sex": rng.choice(["f", "m"], rows),
        "grade": rng.integers(1, 4, rows),
        "ill": rng.choice(["no", "yes"], rows, p=[0.7, 0.3]),
    }
    return columns | changes


def made(table=None, **options):
    return Dataset.from_frame(
        patients() if table is None else table, **({"target": "ill", "drop": ["id"]} | options)
    )


def test_numbers_are_standardised_and_texts_encoded():
    data = made(categorical=["grade"])
    assert data.classes == ("no", "yes")
    assert data.shape == (1 + 2 + 3,)
    assert len(data.y_train) + len(data.y_test) == 40
    x = data.x_train.double().numpy()
    assert abs(x[:, 0].mean()) < 1e-6
    assert x[:, 0].std() == pytest.approx(1)
    np.testing.assert_array_equal(x[:, 1:3].sum(1), 1)
    np.testing.assert_array_equal(x[:, 3:].sum(1), 1)
    assert data.encoder.describe()["categorical"] == ["sex", "grade"]


def test_new_rows_are_encoded_as_the_test_rows_were():
    columns = patients()
    marks = np.arange(40) % 4 == 0
    data = made({**columns, "fold": marks}, test="fold")
    test = {name: np.asarray(values)[marks] for name, values in columns.items()}
    assert torch.equal(data.transform(test), data.x_test)
    assert data.y_test.tolist() == [["no", "yes"].index(text) for text in test["ill"]]
    del test["age"]
    with pytest.raises(HoldfastError, match="the table has no column 'age'; it must have age, sex, grade"):
        data.transform(test)
    with pytest.raises(HoldfastError, match="custom was not created from a table"):
        Dataset.from_arrays(np.zeros((2, 2)), [0, 1], np.zeros((1, 2)), [0]).transform(test)


def test_a_table_of_test_rows():
    data = made(patients(30), test=patients(9, seed=1))
    assert (len(data.y_train), len(data.y_test)) == (30, 9)


def test_the_test_share_is_stratified_and_decided_by_the_seed():
    columns = patients(200)
    one, same, other = (made(columns, test=0.25, seed=seed) for seed in (0, 0, 1))
    yes = columns["ill"].tolist().count("yes")
    assert one.y_test.tolist().count(1) == round(0.25 * yes)
    assert torch.equal(one.x_test, same.x_test)
    assert not torch.equal(one.x_test, other.x_test)


@pytest.mark.parametrize(
    ("target", "classes", "labels"),
    [
        ([2, 10, 2, 10], ("2", "10"), [0, 1, 0, 1]),
        ([0.0, 1.0, 1.0, 0.0], ("0", "1"), [0, 1, 1, 0]),
        ([True, False, True, False], ("0", "1"), [1, 0, 1, 0]),
        (["b", "a", "b", "a"], ("a", "b"), [1, 0, 1, 0]),
        (["10", "9", "10", "9"], ("9", "10"), [1, 0, 1, 0]),
    ],
)
def test_classes_are_sorted(target, classes, labels):
    table = {"x": [1.0, 2.0, 3.0, 4.0], "y": target}
    data = Dataset.from_frame(table, target="y", test={"x": [5.0], "y": target[:1]})
    assert data.classes == classes
    assert data.y_train.tolist() == labels
    given = Dataset.from_frame(table, target="y", test={"x": [5.0], "y": target[:1]}, classes=classes[::-1])
    assert given.y_train.tolist() == [1 - label for label in labels]


def test_files(tmp_path):
    rows = "\n".join(f"{i},{'a' if i % 3 else 'b'},{i % 2}" for i in range(20))
    (tmp_path / "blood.csv").write_text(f"n,kind,ill\n{rows}\n")
    data = Dataset.from_frame(tmp_path / "blood.csv", target="ill")
    assert (data.name, data.shape, len(data.y_train), len(data.y_test)) == ("blood", (3,), 16, 4)


def test_a_column_of_sites():
    columns = patients(60, site=np.array(["oslo", "bern", "rome"])[np.arange(60) % 3])
    data = made(columns, site="site")
    assert data.groups["site"].names == ("bern", "oslo", "rome")
    federation = federate(data, "by-site")
    assert federation.clients == 3
    assert [len(federation.client(k)) for k in range(3)] == np.bincount(data.groups["site"].train).tolist()
    assert (np.bincount(data.groups["site"].test) > 0).all()
    names, of_clients = federation.client_domains()
    assert [names[k] for k in of_clients] == ["bern", "oslo", "rome"]


def test_a_transformer_may_be_handed_in():
    columns = {name: values for name, values in patients().items() if name != "sex"}
    columns["age"] = np.nan_to_num(columns["age"])
    scaled = made(columns, transformer=MinMaxScaler())
    assert (float(scaled.x_train.min()), float(scaled.x_train.max())) == (0, 1)
    fitted = QuantileTransformer(n_quantiles=5).fit(np.stack([columns["age"], columns["grade"]], 1))
    data = made(columns, transformer=fitted)
    assert data.encoder.transformer is fitted
    np.testing.assert_allclose(
        data.transform(columns), fitted.transform(np.stack([columns["age"], columns["grade"]], 1)), rtol=1e-6
    )


def test_a_transformer_fitted_on_a_frame_gets_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2, 3, 4], "b": [0.0, 1, 0, 5], "y": [0, 1, 0, 1]})
    fitted = StandardScaler().fit(frame[["a", "b"]])
    data = Dataset.from_frame(frame, target="y", transformer=fitted, test=0.5)
    np.testing.assert_allclose(data.transform(frame), fitted.transform(frame[["a", "b"]]), rtol=1e-6)


def test_a_category_that_only_test_rows_have():
    test = patients(8, seed=1)
    test["sex"] = ["x", *test["sex"][1:]]
    with pytest.warns(HoldfastWarning, match="column 'sex' has the value 'x' only in test rows"):
        data = made(test=test)
    assert data.x_test[0, 2:].tolist() == [0, 0]


def test_a_column_of_names():
    with pytest.warns(HoldfastWarning, match="column 'id' has 32 different texts in 32 rows"):
        made(drop=[])


def mixed(value):
    columns = patients()
    return columns | {"age": [*columns["age"][:17], value, *columns["age"][18:]]}


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (patients(), {"target": "sick"}, "unknown column of the table 'sick'; known: age, grade, id, ill, sex"),
        (patients(), {"target": []}, "name the target column of the table, such as target='ill'"),
        (patients(), {"drop": "id"}, "drop must be a list of columns, such as ['id'], not 'id'"),
        (patients(), {"drop": ["ill"]}, "'ill' is the target; it cannot be in categorical or drop"),
        (patients(), {"drop": ["height"]}, "unknown column of the table 'height'; known: age"),
        (patients(), {"drop": ["id", "age", "sex", "grade"]}, "the table has no columns other than the target"),
        (mixed("old"), {}, "column 'age' holds 'old' in row 17 of the table, where other values are numbers"),
        (patients(ill=["no", None] * 20), {}, "the target 'ill' is missing in row 1 of the table"),
        (patients(ill=[1.5, np.nan] * 20), {}, "the target 'ill' is missing in row 1 of the table"),
        (patients(ill=np.arange(200), rows=200), {}, "the target 'ill' has 200 different whole numbers; name the task"),
        (patients(age=[None] * 40), {}, "column 'age' has no value in any row; name it in drop"),
        (patients(0), {}, "the table has no rows"),
        (patients(), {"test": -0.1}, "test is -0.1; it must be a share of at least 0 and below 1"),
        (patients(), {"test": "sex"}, "column 'sex' holds 'f' in row 0 of the table; it must mark test rows by 1"),
        (patients(), {"test": "fold"}, "unknown column of the table 'fold'"),
        (patients(), {"test": patients(2) | {"ill": ["no", "maybe"]}},
         "'ill' is 'maybe' in row 1 of the table, which no training row has"),
        (patients(), {"classes": ["no"]}, "the target 'ill' is 'yes' in row"),
        (patients(), {"site": "town"}, "unknown column of the table 'town'"),
        (patients(), {"transformer": StandardScaler}, "transformer is the class StandardScaler; it must be"),
        (patients(), {"transformer": StandardScaler()}, "the transformer StandardScaler() cannot be fitted on these"),
        (patients(), {"transformer": QuantileTransformer()}, "QuantileTransformer cannot be fitted on sums"),
        (np.zeros((3, 2)), {}, "the table is a ndarray; it must be a frame"),
        (patients(), {"target": 5}, "target is 5; it must be the name of a column, or a list of names"),
        (patients(), {"test": None}, "test is None; it must be a number or text"),
        (patients(), {"seed": "a"}, "seed is 'a'; it must be a whole number"),
        (patients(age=[f"{i},5" for i in range(40)]), {}, "column 'age' holds '0,5' in row 0 of the table; write"),
        (patients(ill=[f"{i},5" for i in range(40)]), {}, "column 'ill' holds '0,5' in row 0 of the table; write"),
        (patients(age=[np.inf] * 40), {}, "column 'age' holds an infinite value in row 0"),
        (patients(ill=np.arange(40)), {}, "no site has a test row, as no class has two rows at a site: take a larger"),
    ],
)  # fmt: skip
def test_bad_input(table, options, words):
    with pytest.raises(HoldfastError, match=re.escape(words)):
        made(table, **options)


def test_targets_of_other_tasks():
    rng = np.random.default_rng(0)
    table = {
        "x": rng.normal(size=20), "price": rng.normal(size=20),
        "days": rng.integers(1, 900, 20), "died": rng.integers(0, 2, 20),
        "cough": np.arange(20) % 2, "fever": np.arange(20) // 2 % 2, "visits": rng.integers(0, 9, 20),
    }  # fmt: skip
    fold = {**table, "fold": np.arange(20) % 5 == 0}
    train = np.arange(20) % 5 != 0

    def made(target, task=None):
        drop = [name for name in table if name != "x" and name not in np.atleast_1d(target)]
        data = Dataset.from_frame(fold, target=target, drop=drop, test="fold", task=task)
        expected = (
            np.stack([table[name][train] for name in target], 1)
            if isinstance(target, list)
            else table[target][train]
        )
        np.testing.assert_allclose(data.y_train, expected, rtol=1e-6)
        return data

    assert made("price").task.name == "regression"
    assert made("days", "regression").task.name == "regression"
    assert made("visits", "counts").task.name == "counts"
    assert made(["days", "died"], "survival").task.name == "survival"
    assert made("died", "binary").classes == ("0", "1")
    assert made(["cough", "fever"], "multilabel").labels == ("cough", "fever")
    assert made("died").task.name == "multiclass"
