import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.random import generator
from holdfast.data.dataset import Dataset, Group
from holdfast.data.preprocess import Preprocess


def pixels(*shape):
    return generator(0, "pixels", *shape).integers(0, 256, shape, dtype=np.uint8)


def write_png(path, array):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def from_arrays(x, y=None, **options):
    y = np.arange(len(x)) % 2 if y is None else y
    return Dataset.from_arrays(x, y, x[:2], np.array([0, 1]), **options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((6, 3, 8, 9), (3, 8, 9)),
        ((6, 8, 9, 3), (3, 8, 9)),
        ((6, 8, 9, 1), (1, 8, 9)),
        ((6, 8, 9), (1, 8, 9)),
        ((6, 3, 9, 3), (3, 9, 3)),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "torch", "integers"])
def test_images_become_uint8_channels_first(given, expected, kind):
    x = pixels(*given)
    data = from_arrays({"numpy": x, "torch": torch.from_numpy(x), "integers": x.astype(np.int64)}[kind])
    assert data.shape == expected
    assert data.x_train.dtype == torch.uint8
    assert data.x_train.is_contiguous()
    moved = x.transpose(0, 3, 1, 2) if given[-1] == expected[0] and given[1] != 3 else x
    np.testing.assert_array_equal(data.x_train, moved.reshape(6, *expected))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8, np.uint16, np.uint64, ">i4"])
def test_other_integers_stay_integers(dtype):
    x = np.arange(12).reshape(6, 2).astype(dtype)
    data = from_arrays(x)
    assert data.x_train.dtype == torch.int64
    np.testing.assert_array_equal(data.x_train, x.astype(np.int64))
    assert data.preprocess(data.x_train, dtype=torch.float64).dtype == torch.int64


def test_ids_above_those_that_float32_can_hold_are_kept():
    x = np.array([[2**24 + 1], [2**62 + 1], [-3]])
    assert Dataset.from_arrays(x, [0, 1, 0], x[:1], [0]).x_train.flatten().tolist() == x.ravel().tolist()
    with pytest.warns(
        HoldfastWarning,
        match=r"contains integers above 2\^24, such as 16777217, which are rounded in float32",
    ):
        assert Dataset.from_arrays(x, [0, 1, 0], x[:1], [0]).with_float_samples.x_train.dtype == torch.float32


def test_integers_beside_floats_become_floats():
    data = Dataset.from_arrays(np.array([[1, 2]]), [0], np.array([[0.5, 2.0]]), [0])
    assert (data.x_train.dtype, data.x_test.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.longdouble, bool, ">f8"])
def test_anything_else_becomes_float32(dtype):
    x = np.arange(12).reshape(6, 2).astype(dtype)
    data = from_arrays(x)
    assert data.x_train.dtype == torch.float32
    np.testing.assert_array_equal(data.x_train, x.astype(np.float32))
    assert torch.equal(data.preprocess(data.x_train), data.x_train)


def test_read_only_and_reversed_arrays_are_copied():
    x = pixels(6, 3, 4, 4)[::-1]
    x.flags.writeable = False
    np.testing.assert_array_equal(from_arrays(x).x_train, x)


def test_labels_and_classes():
    x = pixels(6, 1, 4, 4)
    data = from_arrays(x, np.array([[0], [1], [4], [0], [1], [1]], np.float64))
    assert data.y_train.tolist() == [0, 1, 4, 0, 1, 1]
    assert data.y_train.dtype == torch.int64
    assert data.classes == ("0", "1", "2", "3", "4")
    assert from_arrays(x, classes=["cat", "dog", "eel"]).num_classes == 3
    assert data.name == "custom"


@pytest.mark.parametrize("given", [np.array(["ill", "well"]), np.array([7, 9]), [7, "well"]])
def test_class_names_become_strings(given):
    names = from_arrays(pixels(6, 1, 4, 4), classes=given).classes
    assert names == tuple(str(name) for name in given)
    assert {type(name) for name in names} == {str}


class Table:
    """A table with columns that NumPy can convert, as in pandas."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=dtype)


def test_tables_are_converted_to_arrays():
    x, y = [[0.5, 2.0], [1.0, 3.0], [4.0, -1.0]], [0, 1, 1]
    data = Dataset.from_arrays(Table(x), Table(y), Table(x[:1]), Table(y[:1]))
    assert data.x_train.tolist() == x
    assert data.y_train.tolist() == y


def test_repr_of_a_data_set_is_one_line():
    images, labels = np.zeros((6, 5, 4), np.uint8), np.arange(6) % 3
    data = Dataset.from_arrays(images, labels, images[:2], labels[:2], name="mine")
    assert repr(data) == "Dataset('mine', 6 + 2 samples of shape (1, 5, 4), 3 classes)"


def test_groups_are_kept():
    group = Group(("a", "b"), np.array([0, 1, 0, 1, 0, 1]), np.array([1, 1]))
    assert from_arrays(pixels(6, 1, 4, 4), groups={"writer": group}).groups["writer"] is group
    lists = Group(["a", "b"], [0, 1, 0], [1])
    assert lists.names == ("a", "b")
    assert (lists.train.dtype, lists.train.tolist(), lists.test.tolist()) == (np.int64, [0, 1, 0], [1])
    with pytest.raises(HoldfastError, match=r"train entries must be whole numbers: .* from 0 for 'a'"):
        Group(("a", "b"), np.array(["a", "b"]), np.array([0]))


X = pixels(4, 3, 8, 8)
Y = np.array([0, 1, 0, 1])
NAN = np.array([[1.0, 2.0], [np.nan, 1.0], [0.0, 0.0], [np.inf, 1.0]])


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        (
            (NAN, Y, NAN[:1], Y[:1]),
            {},
            "x_train contains NaN or infinite values in 2 of 4 samples; the first is sample 1",
        ),
        ((NAN[:1], Y[:1], NAN, Y), {}, "x_test contains NaN"),
        ((X, Y, X, Y), {"classes": ["one"]}, "y_train has labels from 0 to 1, but they must be from 0 to 0"),
        ((X, Y - 1, X, Y), {}, "labels from -1 to 0"),
        ((X, Y[:3], X, Y), {}, "x_train has 4 samples, but y_train has 3 labels"),
        ((X, Y, X[:3], Y), {}, "x_test has 3 samples, but y_test has 4 labels"),
        ((X[:0], Y[:0], X, Y), {}, "x_train is empty"),
        ((X, Y, X, Y[:0]), {}, "y_test is empty"),
        ((X, np.eye(4), X, Y), {}, "one label per sample"),
        ((X, Y + 0.5, X, Y), {}, "whole numbers"),
        ((X, Y, X[:, :, :4], Y), {}, r"training samples have shape \(3, 8, 8\), test samples \(3, 4, 8\)"),
        ((X, Y, X / 255, Y), {}, "both be images"),
        ((X[:, 0].astype(int), Y, X[:, 0].astype(int) + 200, Y), {}, "both be images"),
        (
            (np.array(["a", "b"]), Y[:2], X, Y),
            {},
            "x_train must be an array of numbers",
        ),
        (
            (X, np.array(["a", "b", "a", "b"]), X, Y),
            {},
            "y_train .* contains strings .*; pass the names as classes",
        ),
        (
            ([[1, 2], [3]], Y[:2], X, Y),
            {},
            "x_train has samples of different lengths",
        ),
        ((X, Y, X, Y), {"classes": "ab"}, "classes must be a list of names, .* not 'ab'"),
        ((X, Y, X, Y), {"classes": 2}, "classes must be a list of names, .* not 2"),
        ((X, Y, X, Y), {"classes": ["a", "a"]}, "classes must differ, but 'a' occurs more than once"),
        ((X, Y, X, Y), {"groups": {"w": Y}}, r"group 'w' is a ndarray; it must be a holdfast\.Group\("),
        ((X * 1j, Y, X, Y), {}, "real numbers"),
        (
            (np.full((4, 2), 1e300), Y, np.ones((4, 2)), Y),
            {},
            "x_train contains NaN or infinite values in 4 of 4",
        ),
        ((np.full((4, 2), 2**63, np.uint64), Y, X, Y), {}, r"x_train .* contains integers above 2\^63 - 1"),
        (
            (np.array([None, 1, 2, 3]), Y, X, Y),
            {},
            "x_train must be an array of numbers: it contains strings or other",
        ),
        (
            (np.array(["2020-01-01"] * 4, "M8[D]"), Y, X, Y),
            {},
            "x_train .* contains dates or times; convert them to numbers",
        ),
        ((X, Y, X, Y), {"preprocess": Preprocess((0.5, 0.5), (1.0, 1.0))}, "mean has 2 channels"),
        ((X, Y, X, Y), {"groups": {"w": Group(("a",), Y[:2], Y)}}, "group 'w' must have one train entry"),
        (
            (X, Y, X, Y),
            {"groups": {"w": Group(("a",), Y * 0, Y)}},
            "group 'w' has test entries outside its 1",
        ),
    ],
)
def test_invalid_arguments_raise_errors(arrays, options, words):
    with pytest.raises(HoldfastError, match=words):
        Dataset.from_arrays(*arrays, **options)


def test_folder_with_train_and_test(tmp_path):
    x = pixels(5, 6, 7, 3)
    for i, where in enumerate(("train/cat", "train/ant", "train/cat/more", "test/ant", "test/cat")):
        write_png(tmp_path / "pets" / where / f"{i}.png", x[i])
    (tmp_path / "pets/train/cat/notes.txt").write_text("not an image")
    data = Dataset.from_folder(tmp_path / "pets")
    assert data.name == "pets"
    assert data.classes == ("ant", "cat")
    assert data.y_train.tolist() == [0, 1, 1]
    np.testing.assert_array_equal(data.x_train, x[[1, 0, 2]].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.x_test, x[[3, 4]].transpose(0, 3, 1, 2))


def test_folder_without_split_is_split_by_seed(tmp_path):
    for name, count in (("a", 10), ("b", 5)):
        for i in range(count):
            write_png(tmp_path / name / f"{i}.png", np.full((4, 4), 16 * i + ord(name) - 97, np.uint8))
    data = Dataset.from_folder(tmp_path)
    assert data.shape == (1, 4, 4)
    assert data.y_train.bincount().tolist() == [8, 4]
    assert data.y_test.bincount().tolist() == [2, 1]
    together = torch.cat((data.x_train, data.x_test))[:, 0, 0, 0]
    assert sorted(together.tolist()) == sorted([16 * i for i in range(10)] + [16 * i + 1 for i in range(5)])
    assert torch.equal(Dataset.from_folder(tmp_path).x_test, data.x_test)
    assert not all(
        torch.equal(Dataset.from_folder(tmp_path, seed=s).x_test, data.x_test) for s in range(1, 5)
    )


@pytest.mark.parametrize("parts", [("train", "val"), ("train",), ("Train", "Test")])
def test_parts_of_a_tree_are_not_classes(tmp_path, parts):
    for part in parts:
        for name in ("cat", "dog"):
            for i in range(5):
                write_png(tmp_path / part / name / f"{i}.png", pixels(4, 4))
    with pytest.raises(HoldfastError, match=r"folder 'T?t?(rain|est)' .* not both 'train' and 'test'"):
        Dataset.from_folder(tmp_path)


def test_a_class_may_be_called_train(tmp_path):
    for name in ("train", "tram"):
        for i in range(5):
            write_png(tmp_path / name / f"{i}.png", pixels(4, 4))
    assert Dataset.from_folder(tmp_path).classes == ("train", "tram")


def test_images_of_different_sizes_need_a_size(tmp_path):
    for i, size in enumerate((8, 8, 6, 8)):
        write_png(tmp_path / f"c{i % 2}/{i}.png", np.full((size, size), 100, np.uint8))
    with pytest.raises(
        HoldfastError,
        match=r"0\.png is 8x8, .*2\.png is 6x6; .*hf\.Dataset\.from_folder\(\.\.\., size=\(8, 8\)",
    ):
        Dataset.from_folder(tmp_path)
    with pytest.raises(HoldfastError, match=r"size is 4; it must be a height and a width"):
        Dataset.from_folder(tmp_path, size=4)
    data = Dataset.from_folder(tmp_path, size=(4, 5))
    assert data.shape == (1, 4, 5)
    assert (data.x_train == 100).all()


def test_one_colour_image_makes_all_of_them_colour(tmp_path):
    grey, colour = pixels(4, 4), pixels(4, 4, 3)
    write_png(tmp_path / "train/a/0.png", grey)
    write_png(tmp_path / "train/b/1.png", colour)
    write_png(tmp_path / "test/a/0.png", grey)
    data = Dataset.from_folder(tmp_path)
    np.testing.assert_array_equal(data.x_train[0], np.stack([grey] * 3))
    np.testing.assert_array_equal(data.x_train[1], colour.transpose(2, 0, 1))


def test_invalid_folders_raise_errors(tmp_path):
    with pytest.raises(HoldfastError, match="there is no folder"):
        Dataset.from_folder(tmp_path / "none")
    with pytest.raises(HoldfastError, match="has no images laid out as"):
        Dataset.from_folder(tmp_path)
    write_png(tmp_path / "train/a/0.png", pixels(4, 4))
    write_png(tmp_path / "test/b/0.png", pixels(4, 4))
    with pytest.raises(HoldfastError, match="has classes that train lacks: b"):
        Dataset.from_folder(tmp_path)
    (tmp_path / "train/b").mkdir()
    (tmp_path / "train/b/1.png").write_bytes(b"not a picture")
    with pytest.raises(HoldfastError, match=r"1\.png cannot be read as an image"):
        Dataset.from_folder(tmp_path)
