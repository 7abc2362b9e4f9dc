"""Data sets from torch's and Hugging Face's data sets, and drawn test shares."""

import re

import numpy as np
import pytest
import torch
from scipy.sparse import eye_array
from torch.utils.data import TensorDataset

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.data.dataset import Dataset

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20) % 2


def rows(x):
    return {tuple(row) for row in np.asarray(x).reshape(len(x), -1).tolist()}


def test_a_test_share_is_drawn_from_each_class():
    data = Dataset.from_arrays(X, Y, test=0.3)
    assert np.bincount(data.y_test).tolist() == [3, 3]
    assert rows(data.x_train) | rows(data.x_test) == rows(X)
    assert not rows(data.x_train) & rows(data.x_test)
    same, other = (
        Dataset.from_arrays(torch.tensor(X), torch.tensor(Y), test=0.3),
        Dataset.from_arrays(X, Y, test=0.3, seed=1),
    )
    assert torch.equal(data.x_test, same.x_test)
    assert not torch.equal(data.x_test, other.x_test)


def test_a_test_share_is_drawn_from_each_quarter_of_numbers():
    y = np.arange(20) + 0.5
    tested = np.sort(Dataset.from_arrays(X, y, test=0.2).y_test.numpy())
    assert len(tested) == 4
    assert (np.floor(tested / 5) == np.arange(4)).all()


def test_a_data_set_without_test_samples():
    data = Dataset.from_arrays(X, Y, test=0)
    assert (len(data.y_train), len(data.y_test), data.x_test.shape) == (20, 0, (0, 3))
    empty = Dataset.from_arrays(X, Y, X[:0], Y[:0])
    assert torch.equal(empty.x_train, data.x_train)
    assert empty.num_classes == data.num_classes == 2
    numbers = Dataset.from_arrays(X, np.stack([Y + 0.5, Y]).T, test=0, task="regression")
    assert (numbers.task.name, numbers.y_test.shape) == ("regression", (0, 2))


def test_labels_that_begin_at_1_are_reported():
    with pytest.warns(
        HoldfastWarning, match="the labels begin at 1, .* 3 classes, 1 of them without samples"
    ):
        data = Dataset.from_arrays(X, Y + 1)
    assert data.num_classes == 3


def test_a_torch_data_set():
    data = Dataset.from_torch(TensorDataset(torch.tensor(X), torch.tensor(Y)))
    assert (len(data.y_train), len(data.y_test), data.shape, data.num_classes) == (16, 4, (3,), 2)
    given = Dataset.from_torch(
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        test=TensorDataset(torch.tensor(X[:3]), torch.tensor(Y[:3])),
    )
    np.testing.assert_array_equal(given.x_train, X)
    np.testing.assert_array_equal(given.x_test, X[:3])


class Pictures:
    """As torchvision's: images and labels, with names of classes."""

    classes = ("cat", "dog")

    def __len__(self):
        return 10

    def __getitem__(self, index):
        image = pytest.importorskip("PIL.Image")
        return image.fromarray(np.full((4, 5), index, np.uint8)), index % 2


def test_a_torch_data_set_of_images():
    data = Dataset.from_torch(Pictures(), test=Pictures(), name="pets")
    assert (data.shape, data.x_train.dtype, data.classes, data.name) == (
        (1, 4, 5),
        torch.uint8,
        ("cat", "dog"),
        "pets",
    )


class Columns:
    """What Hugging Face's data sets have: names and features of columns, and columns by name."""

    def __init__(self, columns, names=()):
        self._columns, self.column_names = columns, list(columns)
        self.features = {column: object() for column in columns}
        if names:
            self.features["label"] = type("ClassLabel", (), {"names": list(names)})()

    def __getitem__(self, column):
        return self._columns[column]


TOKENS = [[1, 2, 2**25 + 1], [4, 5, 6], [7, 8, 9], [1, 1, 1]]


@pytest.mark.parametrize("real", [False, True])
def test_a_hugging_face_data_set(real):
    columns, names = {"ids": TOKENS, "label": [0, 1, 0, 1], "text": list("abcd")}, ["bad", "good"]
    if real:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(
            ids=datasets.Sequence(datasets.Value("int64")),
            label=datasets.ClassLabel(names=names),
            text=datasets.Value("string"),
        )
        given = datasets.Dataset.from_dict(columns, features=features)
        parts = datasets.DatasetDict(train=given, test=given.select([0]))
    else:
        given = Columns(columns, names)
        parts = {"train": given, "test": Columns({"ids": TOKENS[:1], "label": [0]}, names)}
    data = Dataset.from_huggingface(parts, inputs="ids", target="label")
    assert data.x_train.tolist() == TOKENS
    assert (data.x_train.dtype, data.classes, data.x_test.tolist()) == (
        torch.int64,
        ("bad", "good"),
        TOKENS[:1],
    )
    drawn = Dataset.from_huggingface(given, inputs="ids", target="label", test=0.5)
    assert np.bincount(drawn.y_test).tolist() == [1, 1]


def test_a_hugging_face_data_set_as_a_table():
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_dict(
        {"age": [1.0, None, 3.0] * 4, "sex": ["f", "m", None] * 4, "ill": [0, 1] * 6}
    )
    assert Dataset.from_frame(given, target="ill").shape == (3,)


class Unreadable(Pictures):
    def __getitem__(self, index):
        if index:
            raise OSError("no such picture")
        return X[0], 0


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.float16, torch.float32),
        (torch.uint16, torch.int64),
        (torch.int16, torch.int64),
    ],
)
def test_types_that_numpy_lacks(dtype, kept):
    values = torch.tensor([[1, 2], [4, 8]] * 10)
    for test in ({}, {"x_test": values.to(dtype), "y_test": Y}):
        data = Dataset.from_arrays(values.to(dtype), Y, **test)
        assert data.x_train.dtype == kept
        assert sorted(map(tuple, data.x_train.tolist())) == sorted(
            map(tuple, values[: len(data.x_train)].tolist())
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dataset.from_arrays(X, Y, X), "x_test and y_test must be given together, or both be left out"),
        (lambda: Dataset.from_arrays(X, Y, test=1), "test is 1; it must be a share of at least 0 and below 1"),
        (lambda: Dataset.from_arrays(X, Y[:3]), "x has 20 samples, but y has 3 targets"),
        (
            lambda: Dataset.from_arrays(X, list("ab") * 10),
            "y_train must be an array of numbers: it contains strings",
        ),
        (lambda: Dataset.from_arrays(X, Y, seed="a"), "seed is 'a'; it must be a whole number"),
        (lambda: Dataset.from_arrays([[1, 2], [3]], [0, 1]), "x_train has samples of different lengths; make them"),
        (lambda: Dataset.from_arrays(np.ma.masked_less(X, 0.5), Y), "x_train must be an array of numbers: it is a"),
        (lambda: Dataset.from_arrays(eye_array(20), Y), "it is a sparse matrix; pass its toarray()"),
        (lambda: Dataset.from_arrays(torch.eye(20).to_sparse(), Y), "it is a sparse tensor; pass its to_dense()"),
        (lambda: Dataset.from_arrays(torch.eye(20, device="meta"), Y), "it is a meta tensor, which contains no values"),
        (lambda: Dataset.from_arrays(np.zeros(20, [("a", float)]), Y), "it is a structured array; pass it to Dataset."),
        (lambda: Dataset.from_arrays(X.astype(complex), Y), "x_train must be real numbers, not complex ones"),
        (lambda: Dataset.from_arrays(X, Y.astype(complex)), "y_train must be real numbers, not complex ones"),
        (lambda: Dataset.from_torch(Unreadable()), "item 1 of the data set cannot be read: OSError: no such picture"),
        (lambda: Dataset.from_torch(5), "the data set is a int; it must be a map-style data set"),
        (
            lambda: Dataset.from_torch([1, 2]),
            "item 0 of the data set is a int; it must be a pair (sample, target)",
        ),
        (lambda: Dataset.from_torch([]), "the data set is empty; it must hold at least one sample"),
        (
            lambda: Dataset.from_torch([(X[0], 0), (X[1, :2], 1)]),
            "the samples of the data set differ in shape: (3,) in item 0, (2,) in item 1",
        ),
        (
            lambda: Dataset.from_torch([("text", 0)]),
            "the sample of item 0 of the data set is a str; it must be a tensor, an array, an image or a number",
        ),
        (
            lambda: Dataset.from_huggingface(X, inputs="x", target="y"),
            "the data set is a ndarray; it must be one of",
        ),
        (
            lambda: Dataset.from_huggingface(Columns({"ids": TOKENS}), inputs="ids", target="label"),
            "unknown column of the data set 'label'; known: ids",
        ),
        (
            lambda: Dataset.from_huggingface({"train": Columns({})}, inputs="ids", target="label"),
            "a DatasetDict must have the parts train and test, not train",
        ),
    ],
)  # fmt: skip
def test_bad_input(make, words):
    with pytest.raises(HoldfastError, match=re.escape(words)):
        make()
