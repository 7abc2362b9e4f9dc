import bz2
import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.preprocess import Preprocess, preprocess_for
from holdfast.data.sources import DATASETS, default_partition, describe, formats, load
from holdfast.data.sources.files import File, download, unpack
from holdfast.data.sources.formats import read_idx, stratified_split
from holdfast.data.sources.pickles import read_pickled_arrays
from holdfast.training.experiment import Experiment

PUBLISHED = dict(DATASETS)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A temporary search root and cache; md5 sums of the small files are not checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    for name, source in DATASETS.items():
        monkeypatch.setitem(DATASETS, name, without_md5(source))
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def without_md5(source):
    def bare(files):
        return tuple(replace(file, md5=None) for file in files)

    layouts = tuple(
        replace(one, files=bare(one.files), archives=bare(one.archives)) for one in source.layouts
    )
    writers = source.writers and (bare(source.writers[0]), source.writers[1])
    return replace(source, layouts=layouts, writers=writers, installed=None)


def pixels(*shape):
    return generator(0, "pixels", *shape).integers(0, 256, shape, dtype=np.uint8)


def write_idx(path, array):
    codes = {"uint8": 8, "int32": 12}
    header = bytes([0, 0, codes[array.dtype.name], array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + array.astype(array.dtype.newbyteorder(">")).tobytes()))


def write_mnist(folder, train=12, test=5):
    images = pixels(train, 28, 28), pixels(test, 28, 28)
    labels = np.arange(train, dtype=np.uint8) % 10, np.arange(test, dtype=np.uint8) % 10
    for name, x, y in zip(("train", "t10k"), images, labels, strict=True):
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", x)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", y)
    return *images, *labels


def write_png(path, array):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


# Pickles.


class Attack:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.mark.parametrize("protocol", range(6))
def test_pickled_arrays_are_read_as_pickle_would(protocol):
    grid = np.asfortranarray(np.arange(12, dtype=">i4").reshape(3, 4))
    content = {"data": pixels(3, 4), "grid": grid, "labels": [1, 2, 3], "ratio": (0.5, None, True)}
    got = read_pickled_arrays(pickle.dumps(content, protocol), "test")
    np.testing.assert_array_equal(got["data"], content["data"])
    np.testing.assert_array_equal(got["grid"], content["grid"])
    assert got["data"].dtype == np.uint8
    assert got["labels"] == [1, 2, 3]
    assert got["ratio"] == (0.5, None, True)


def test_strings_of_python_2_are_text():
    assert read_pickled_arrays(b"\x80\x02}q\x00U\x04dataq\x01U\x03catq\x02s.", "test") == {"data": "cat"}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, protocol):
    trace = tmp_path / "ran"
    for attack in (
        Attack(os.system, f"touch {trace}"),
        Attack(eval, "1"),
        Attack(exec, "1"),
        Attack(getattr, 1, "x"),
    ):
        content = pickle.dumps({"data": pixels(2, 2), "labels": attack}, protocol)
        with pytest.raises(HoldfastError, match="refused as a file of arrays: it names"):
            read_pickled_arrays(content, "batch")
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(np.array([object], dtype=object)),
        pickle.dumps(pixels(5, 5))[:40],
        b"",
        b"not a pickle",
        pickle.dumps(Path("x")),
        # A state for one of the stand-ins themselves: {"__setstate__": 1} for numpy.ndarray.
        b"\x80\x02cnumpy\nndarray\n}U\x0c__setstate__K\x01sb.",
        # An array of four bytes that claims to hold 4,000,000.
        pickle.dumps(np.zeros(4, np.uint8), 2).replace(b"K\x04\x85", b"J\x00\x09\x3d\x00\x85"),
        # A value to be kept at place 2,147,483,647: the unpickler would make room for all before it.
        b"\x80\x02K\x01r\xff\xff\xff\x7f.",
    ],
)
def test_pickles_of_other_objects_are_refused(content):
    with pytest.raises(HoldfastError, match="batch is refused"):
        read_pickled_arrays(content, "batch")


def test_a_value_with_many_references_is_converted_once():
    """Forty lists, each of which contains the previous one twice: 2**40 lists if they were copied."""
    nested = []
    for _ in range(40):
        nested = [nested, nested]
    got = read_pickled_arrays(pickle.dumps(nested), "batch")
    assert got[0] is got[1]


# Formats, each written as published and read through `load`.


def test_mnist(root):
    x_train, x_test, y_train, y_test = write_mnist(root / "mnist")
    data = load("mnist", root=root)
    assert data.x_train.dtype == torch.uint8
    np.testing.assert_array_equal(data.x_train[:, 0], x_train)
    np.testing.assert_array_equal(data.x_test[:, 0], x_test)
    np.testing.assert_array_equal(data.y_train, y_train)
    np.testing.assert_array_equal(data.y_test, y_test)
    assert data.preprocess == preprocess_for("mnist")
    assert not data.groups


def test_mnist_has_writers_if_qmnist_is_found(root):
    write_mnist(root / "mnist", train=4, test=2)
    rows = np.zeros((4, 8), np.int32)
    rows[:, 2] = [7, 5, 7, 9]
    write_idx(root / "mnist-writers/qmnist-train-labels-idx2-int.gz", rows)
    rows = np.zeros((2, 8), np.int32)
    rows[:, 2] = [30, 5]
    write_idx(root / "mnist-writers/qmnist-test-labels-idx2-int.gz", rows)
    group = load("mnist", root=root).groups["writer"]
    assert [group.names[code] for code in group.train] == ["writer-7", "writer-5", "writer-7", "writer-9"]
    assert [group.names[code] for code in group.test] == ["writer-30", "writer-5"]
    assert len(group.names) == 4


def test_fashion_mnist_as_debian_installs_it(root, monkeypatch):
    installed = root / "usr/share/datasets/fashion-mnist"
    x_train, *_ = write_mnist(installed)
    # With the published sums: the package's files are compressed anew, so theirs differ.
    published = PUBLISHED["fashion-mnist"]
    assert published.installed == Path("/usr/share/datasets/fashion-mnist")
    monkeypatch.setitem(DATASETS, "fashion-mnist", replace(published, installed=installed))
    data = load("fashion-mnist", root=root / "empty", download=False)
    np.testing.assert_array_equal(data.x_train[:, 0], x_train)
    assert data.classes[9] == "boot"


@pytest.mark.parametrize(
    ("name", "split", "first"), [("emnist", "digits", 0), ("emnist-letters", "letters", 1)]
)
def test_emnist_stands_upright_and_counts_from_zero(root, name, split, first):
    x, y = pixels(6, 28, 28), np.arange(6, dtype=np.uint8)
    for part in ("train", "test"):
        write_idx(root / f"emnist/gzip/emnist-{split}-{part}-images-idx3-ubyte.gz", x)
        write_idx(root / f"emnist/gzip/emnist-{split}-{part}-labels-idx1-ubyte.gz", y + np.uint8(first))
    data = load(name, root=root)
    np.testing.assert_array_equal(data.x_test[3, 0, 5, 20], x[3, 20, 5])
    np.testing.assert_array_equal(data.y_train, y)
    assert data.classes[1] == ("1" if split == "digits" else "b")


def cifar_archive(name, entries):
    """A .tar.gz as published: pickles of protocol 2 whose keys are bytes, as Python 2 wrote them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for entry, content in entries.items():
            raw = pickle.dumps(content, 2)
            info = tarfile.TarInfo(f"{name}/{entry}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


def cifar10_archive():
    images = pixels(12, 3, 32, 32)
    entries = {
        f"data_batch_{i + 1}": {b"data": images[2 * i : 2 * i + 2].reshape(2, -1), b"labels": [i, 9 - i]}
        for i in range(5)
    }
    entries["test_batch"] = {b"data": images[10:].reshape(2, -1), b"labels": [3, 4]}
    entries["batches.meta"] = {b"label_names": [b"airplane", *(f"class {i}".encode() for i in range(1, 10))]}
    return images, cifar_archive("cifar-10-batches-py", entries)


def cifar10_binary_archive():
    """The binary version: records of a label and an image; names in a text file that ends in an empty line."""
    images = pixels(12, 3, 32, 32)
    labels = [0, 9, 1, 8, 2, 7, 3, 6, 4, 5, 3, 4]
    records = [bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True)]
    contents = {f"data_batch_{i + 1}.bin": b"".join(records[2 * i : 2 * i + 2]) for i in range(5)}
    contents["test_batch.bin"] = b"".join(records[10:])
    contents["batches.meta.txt"] = b"airplane\n" + b"".join(b"class %d\n" % i for i in range(1, 10)) + b"\n"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, raw in contents.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return images, buffer.getvalue()


def test_cifar10_from_the_binary_archive_without_a_pickle(root, monkeypatch):
    monkeypatch.setattr(formats, "read_pickled_arrays", None)
    images, archive = cifar10_binary_archive()
    (root / "cifar-10-binary.tar.gz").write_bytes(archive)
    (root / "cifar-10-python.tar.gz").write_bytes(b"is not read")
    data = load("cifar10", root=root, download=False)
    np.testing.assert_array_equal(data.x_train, images[:10])
    np.testing.assert_array_equal(data.x_test, images[10:])
    assert data.y_train.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.y_test.tolist() == [3, 4]
    assert data.classes == ("airplane", *(f"class {i}" for i in range(1, 10)))


def test_cifar100_from_the_binary_version(root):
    train, test = pixels(100, 3, 32, 32), pixels(3, 3, 32, 32)
    folder = root / "cifar-100-binary"
    folder.mkdir()
    for name, x, y in (("train", train, list(range(100))), ("test", test, [7, 8, 99])):
        records = [
            bytes([5, label]) + image.tobytes() for label, image in zip(y, x, strict=True)
        ]  # 5: coarse
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    (folder / "fine_label_names.txt").write_text("".join(f"c{i}\n" for i in range(100)))
    data = load("cifar100", root=root)
    np.testing.assert_array_equal(data.x_test, test)
    assert data.y_test.tolist() == [7, 8, 99]
    assert data.classes[99] == "c99"


@pytest.mark.parametrize("place", ["cifar10", "."])
def test_cifar10_from_the_archive_as_published(root, place):
    images, archive = cifar10_archive()
    (root / place).mkdir(exist_ok=True)
    (root / place / "cifar-10-python.tar.gz").write_bytes(archive)
    data = load("cifar10", root=root, download=False)
    np.testing.assert_array_equal(data.x_train, images[:10])
    np.testing.assert_array_equal(data.x_test, images[10:])
    assert data.y_train.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.classes[0] == "airplane"
    # Unpacked into the cache, and not beside the user's file.
    assert (root.parent / "cache/holdfast/cifar10/cifar-10-batches-py/test_batch").exists()
    assert not list(root.rglob("test_batch"))


def test_cifar100(root):
    train, test = pixels(100, 3, 32, 32), pixels(3, 3, 32, 32)
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, x, y in (("train", train, list(range(100))), ("test", test, [7, 8, 99])):
        content = {b"data": x.reshape(len(x), -1), b"fine_labels": y, b"coarse_labels": [0] * len(y)}
        (folder / name).write_bytes(pickle.dumps(content, 2))
    (folder / "meta").write_bytes(
        pickle.dumps({b"fine_label_names": [f"c{i}".encode() for i in range(100)]}, 2)
    )
    data = load("cifar100", root=root, preprocess="fedntd")
    np.testing.assert_array_equal(data.x_test, test)
    assert data.y_test.tolist() == [7, 8, 99]
    assert data.classes[99] == "c99"
    assert data.preprocess.cutout == 16


@pytest.mark.parametrize(("name", "prefix"), [("svhn", ""), ("synth-digits", "synth_")])
def test_mat_digits(root, name, prefix):
    from scipy.io import savemat

    x = pixels(32, 32, 3, 4)
    (root / name).mkdir()
    for part in ("train", "test"):
        savemat(
            root / name / f"{prefix}{part}_32x32.mat",
            {"X": x, "y": np.array([[10], [1], [9], [2]], np.uint8)},
        )
    data = load(name, root=root)
    assert data.y_train.tolist() == [0, 1, 9, 2]
    assert data.x_train[2, 1, 30, 4] == x[30, 4, 1, 2]
    assert data.shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["svhn", "mnist-m", "synth-digits"])
def test_digit_domains_as_npz(root, name):
    x = pixels(5, 32, 32, 3)
    (root / "domains").mkdir()
    np.savez(root / f"domains/{name}.npz", x_train=x, y_train=np.arange(5), x_test=x[:2], y_test=np.arange(2))
    data = load(name, root=root, download=False)
    np.testing.assert_array_equal(data.x_train, x.transpose(0, 3, 1, 2))
    assert data.num_classes == 10


def test_digit_domains_as_fedbn_prepares_them(root):
    folder = root / "SynthDigits"
    (folder / "partitions").mkdir(parents=True)
    x, y = pixels(20, 32, 32, 3), np.arange(20) % 10
    for i in range(10):
        part = (x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2])
        (folder / f"partitions/train_part{i}.pkl").write_bytes(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
    (folder / "test.pkl").write_bytes(pickle.dumps((x[:3], y[:3]), pickle.HIGHEST_PROTOCOL))
    data = load("synth-digits", root=root)
    np.testing.assert_array_equal(data.x_train, x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.y_test, y[:3])


def test_mnist_m_as_images_and_as_tensors(root):
    x, y = pixels(3, 32, 32, 3), [4, 0, 9]
    folder = root / "mnist_m"
    for part in ("train", "test"):
        for i in range(3):
            write_png(folder / f"mnist_m_{part}/{i:08}.png", x[i])
        lines = "".join(f"{i:08}.png {y[i]}\n" for i in (2, 0, 1))
        (folder / f"mnist_m_{part}_labels.txt").write_text(lines)
    data = load("mnist-m", root=root)
    np.testing.assert_array_equal(data.x_train, x[[2, 0, 1]].transpose(0, 3, 1, 2))
    assert data.y_train.tolist() == [9, 4, 0]

    (root / "mnist-m").mkdir()
    for part in ("train", "test"):
        torch.save((torch.from_numpy(x), torch.tensor(y)), root / f"mnist-m/mnist_m_{part}.pt")
    data = load("mnist-m", root=root)
    np.testing.assert_array_equal(data.x_test, x.transpose(0, 3, 1, 2))
    assert data.y_test.tolist() == y


def test_usps_as_hdf5_and_as_libsvm_agree(root):
    import h5py

    values = pixels(3, 256) / 255
    labels = [0, 5, 9]
    for folder in ("h5", "libsvm"):
        (root / folder / "usps").mkdir(parents=True)
    with h5py.File(root / "h5/usps/usps.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/data"], file[f"{part}/target"] = values.astype(np.float32), labels
    lines = "".join(
        f"{label + 1} " + " ".join(f"{i + 1}:{2 * v - 1:.6f}" for i, v in enumerate(row)) + " \n"
        for label, row in zip(labels, values, strict=True)
    )
    for name in ("usps.bz2", "usps.t.bz2"):
        (root / "libsvm/usps" / name).write_bytes(bz2.compress(lines.encode()))
    for folder in ("h5", "libsvm"):
        data = load("usps", root=root / folder)
        np.testing.assert_array_equal(data.x_train, pixels(3, 256).reshape(3, 1, 16, 16))
        assert data.y_test.tolist() == labels


def test_femnist_keeps_its_writers(root):
    values = pixels(5, 784)

    def user(*rows):
        return {"x": (values[list(rows)] / 255).round(4).tolist(), "y": [60 + row % 2 for row in rows]}

    files = {
        "train/all_data_0.json": {"f01_2": user(0, 1)},
        "train/all_data_1.json": {"f00_1": user(2), "f03_3": user(3)},
        "test/all_data_0.json": {"f00_1": user(4), "f01_2": user(0)},
    }
    for name, users in files.items():
        path = root / "femnist/data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = [len(data["y"]) for data in users.values()]
        path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": users}))
    data = load("femnist", root=root)
    np.testing.assert_array_equal(data.x_train.flatten(1), values[:4])
    group = data.groups["writer"]
    assert [group.names[code] for code in group.train] == ["f01_2", "f01_2", "f00_1", "f03_3"]
    assert [group.names[code] for code in group.test] == ["f00_1", "f01_2"]
    assert data.y_train.tolist() == [60, 61, 60, 61]
    assert data.classes[10] == "A"
    assert data.classes[61] == "z"


def test_cinic10(root):
    x = pixels(6, 32, 32, 3)
    for i, where in enumerate(
        ("train/bird", "train/cat", "train/bird", "valid/bird", "test/cat", "test/bird")
    ):
        write_png(root / "CINIC-10" / where / f"{i}.png", x[i])
    data = load("cinic10", root=root)
    np.testing.assert_array_equal(data.x_train, x[[0, 2, 1]].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.x_test, x[[5, 4]].transpose(0, 3, 1, 2))
    assert data.y_train.tolist() == [0, 0, 1]
    assert data.classes == ("bird", "cat")


def test_tiny_imagenet_tests_on_its_validation_images(root):
    x = pixels(4, 64, 64, 3)
    folder = root / "tiny-imagenet-200"
    write_png(folder / "train/n02/images/n02_0.png", x[0])
    write_png(folder / "train/n01/images/n01_0.png", x[1][..., 0])
    write_png(folder / "val/images/val_0.png", x[2])
    write_png(folder / "val/images/val_1.png", x[3])
    (folder / "val/val_annotations.txt").write_text(
        "val_1.png\tn02\t0\t0\t9\t9\nval_0.png\tn01\t0\t0\t9\t9\n"
    )
    data = load("tiny-imagenet", root=root)
    np.testing.assert_array_equal(data.x_test, x[[3, 2]].transpose(0, 3, 1, 2))
    assert data.y_test.tolist() == [1, 0]
    np.testing.assert_array_equal(data.x_train[0, 2], x[1][..., 0])
    assert data.classes == ("n01", "n02")


def test_digits_are_embedded_and_split_by_class(root):
    data = load("digits", root=root, download=False)
    assert data.x_train.shape == (1438, 1, 8, 8)
    assert data.x_test.shape == (359, 1, 8, 8)
    assert int(data.x_train.max()) == 255
    shares = data.y_test.bincount() / (data.y_test.bincount() + data.y_train.bincount())
    assert ((shares - 0.2).abs() < 0.005).all()
    assert torch.equal(load("digits").y_train, data.y_train)


def test_stratified_split_gives_every_class_to_both_sides():
    labels = np.array([0] * 10 + [1] * 3 + [2] + [3] * 2)[generator(0, "shuffle").permutation(16)]
    train, test = stratified_split(labels, generator(0, "split"))
    assert sorted([*train, *test]) == list(range(16))
    assert np.bincount(labels[test], minlength=4).tolist() == [2, 1, 0, 1]
    other = stratified_split(labels, generator(1, "split"))[1]
    assert not np.array_equal(test, other)


# Finding, checking, downloading.


def test_roots_are_searched_in_order(root, monkeypatch, tmp_path):
    firsts = []
    for folder in (tmp_path / "cache/holdfast", tmp_path / "variable", root):
        write_mnist(folder / "mnist", train=len(firsts) + 3)
        firsts.append(len(firsts) + 3)
    assert len(load("mnist").x_train) == firsts[0]
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "variable"))
    assert len(load("mnist").x_train) == firsts[1]
    assert len(load("mnist", root=root).x_train) == firsts[2]


def test_a_damaged_file_is_named(root, monkeypatch):
    monkeypatch.setitem(DATASETS, "mnist", PUBLISHED["mnist"])
    write_mnist(root / "mnist")
    with pytest.raises(
        HoldfastError, match=r"train-images-idx3-ubyte\.gz is damaged.*f68b3c2dcbeaaa9fbdd348bb"
    ):
        load("mnist", root=root)


def test_a_truncated_file_without_known_sum_is_named(root):
    write_mnist(root / "mnist")
    path = root / "mnist/t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(HoldfastError, match=r"mnist files in .* cannot be read"):
        load("mnist", root=root)
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(HoldfastError, match="is not an IDX file"):
        read_idx(path)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_missing_files_are_described_in_one_sentence(root, name):
    with pytest.raises(HoldfastError) as caught:
        load(name, root=root, download=False)
    message = str(caught.value)
    layout = DATASETS[name].layouts[0]
    file = (layout.archives or layout.files)[0]
    assert file.name in message
    assert (file.url or DATASETS[name].page) in message
    assert str(root / layout.home) in message
    assert "\n" not in message


def published_at(source, folder):
    """The source, with every address pointing into a folder of this machine."""

    def move(files):
        return tuple(replace(file, url=file.url and (folder / file.name).as_uri()) for file in files)

    layouts = tuple(
        replace(one, files=move(one.files), archives=move(one.archives)) for one in source.layouts
    )
    return replace(source, layouts=layouts)


def test_bare_files_are_downloaded_into_the_cache_once(root, monkeypatch, tmp_path):
    x_train, *_ = write_mnist(tmp_path / "server")
    monkeypatch.setitem(DATASETS, "mnist", published_at(DATASETS["mnist"], tmp_path / "server"))
    np.testing.assert_array_equal(load("mnist", root=root).x_train[:, 0], x_train)
    assert not list(root.iterdir())
    for path in (tmp_path / "server").iterdir():
        path.unlink()
    np.testing.assert_array_equal(load("mnist").x_train[:, 0], x_train)


def test_archives_are_downloaded_unpacked_and_dropped(root, monkeypatch, tmp_path):
    images, archive = cifar10_binary_archive()
    (tmp_path / "server").mkdir()
    (tmp_path / "server/cifar-10-binary.tar.gz").write_bytes(archive)
    monkeypatch.setitem(DATASETS, "cifar10", published_at(DATASETS["cifar10"], tmp_path / "server"))
    np.testing.assert_array_equal(load("cifar10").x_test, images[10:])
    assert [path.name for path in (tmp_path / "cache/holdfast/cifar10").iterdir()] == ["cifar-10-batches-bin"]


def test_a_failed_download_raises_an_error_with_instructions(root, monkeypatch, tmp_path):
    monkeypatch.setitem(DATASETS, "cifar10", published_at(DATASETS["cifar10"], tmp_path / "nowhere"))
    with pytest.raises(HoldfastError, match=r"cifar-10-binary\.tar\.gz \(the download failed: .*put it in"):
        load("cifar10", root=root)
    assert not list((tmp_path / "cache/holdfast").iterdir())


def test_a_download_that_is_not_the_published_file_leaves_nothing(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    url = (tmp_path / "file").as_uri()
    with pytest.raises(HoldfastError, match="damaged"):
        download(File("file", url, "0" * 32), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    good = File("file", url, hashlib.md5(b"content").hexdigest())
    assert download(good, tmp_path / "cache").read_bytes() == b"content"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["file"]


def test_archives_cannot_reach_outside(tmp_path):
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../escaped"), io.BytesIO())
    with pytest.raises(HoldfastError, match=r"bad\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "bad.tar.gz", tmp_path / "into/deep")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as packed:
        packed.writestr("../../escaped", "x")
    unpack(tmp_path / "bad.zip", tmp_path / "into/deep")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "into/escaped").exists()
    (tmp_path / "cut.tar.gz").write_bytes(cifar10_archive()[1][:5000])
    with pytest.raises(HoldfastError, match="cannot be unpacked"):
        unpack(tmp_path / "cut.tar.gz", tmp_path / "into/deep")


# The user's own files.


def test_npz(tmp_path):
    x = pixels(6, 10, 10)
    np.savez(
        tmp_path / "mine.npz", x_train=x, y_train=np.arange(6) % 3, x_test=x[:2], y_test=np.array([0, 2])
    )
    data = load(tmp_path / "mine.npz")
    assert data.name == "mine"
    assert data.shape == (1, 10, 10)
    assert data.num_classes == 3
    assert data.preprocess == Preprocess()
    own = Preprocess((0.5,), (0.5,), flip=True)
    assert load(str(tmp_path / "mine.npz"), preprocess=own).preprocess == own


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x_train": np.zeros(3)}, "has no array called y_train or x_test or y_test"),
        (dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.array([{}])), "plain arrays"),
    ],
)
def test_unusable_npz(tmp_path, arrays, words):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(HoldfastError, match=words):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (3, "the data set is a int; it must be a name, such as 'digits', or a path"),
        ("cifra10", "unknown data set 'cifra10'; did you mean cifar10"),
        ("some/folder", "there is no folder some/folder"),
        ("none.npz", r"none\.npz cannot be read"),
    ],
)
def test_unknown_names(name, words):
    with pytest.raises(HoldfastError, match=words):
        load(name)


def test_unsuitable_presets_raise_errors_before_reading(root):
    with pytest.raises(HoldfastError, match="does not include 'mnist'"):
        load("mnist", root=root, preprocess="fedka")


def test_describe_returns_sizes_and_locations(root):
    write_mnist(root / "mnist")
    rows = {row["name"]: row for row in describe(root)}
    assert list(rows) == list(DATASETS)
    assert rows["digits"]["found"] == "embedded"
    assert rows["mnist"]["found"] == str(root / "mnist")
    assert rows["mnist"]["missing"] is None
    assert "cifar-10-binary.tar.gz" in rows["cifar10"]["missing"]
    assert rows["cifar100"]["classes"] == 100
    assert (rows["svhn"]["train"], rows["svhn"]["shape"]) == (73_257, [3, 32, 32])
    assert json.loads(json.dumps(rows)) == rows


def test_describe_counts_the_samples_of_a_partial_data_set(root):
    (root / "domains").mkdir()
    x, y = pixels(6, 28, 28, 3), np.arange(6)
    np.savez(root / "domains/mnist-m.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    (root / "domains/svhn.npz").write_bytes(b"damaged")
    rows = {row["name"]: row for row in describe(root)}
    assert [rows["mnist-m"][key] for key in ("train", "test", "shape")] == [6, 2, [3, 28, 28]]
    assert rows["svhn"]["train"] == 73_257


# Real files.

realdata = pytest.mark.skipif("HOLDFAST_DATA" not in os.environ, reason="needs data sets in HOLDFAST_DATA")


@pytest.mark.realdata
@realdata
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "usps", "svhn", "mnist-m"])
def test_real_files(name):
    source = DATASETS[name]
    row = next(row for row in describe() if row["name"] == name)
    if not row["found"]:
        pytest.skip(row["missing"])
    data = load(name, download=False)
    part = Path(row["found"]).name == "domains"
    assert (len(data.x_train), len(data.x_test)) == ((7430, 2000) if part else (source.train, source.test))
    assert data.num_classes == source.classes
    assert data.x_train.dtype == torch.uint8
    # By its own constants a data set is normalised to mean 0 and deviation 1; MNIST-M's are halves.
    if name != "mnist-m":
        x = data.preprocess(data.x_train[::5])
        assert x.mean().abs() < 0.02
        assert (x.std() - 1).abs() < 0.02


@pytest.mark.realdata
@realdata
def test_real_writers():
    groups = load("mnist", download=False).groups
    if not groups:
        pytest.skip("no mnist-writers in HOLDFAST_DATA")
    writers = groups["writer"]
    assert len(np.unique(writers.train)) == 539
    assert len(np.unique(writers.test)) == 297


# Tables.


def write_clinics(folder):
    folder.mkdir()
    for number, town in enumerate(("lyon", "paris")):
        rows = [f"{i},{'ab'[i % 2]},{(i + number) % 3 % 2}\n" for i in range(20)]
        (folder / f"{town}.csv").write_text("age,sex,ill\n" + "".join(rows))


def test_tables_with_options(tmp_path):
    write_clinics(tmp_path / "clinics")
    data = load(f"{tmp_path}/clinics/lyon.csv:target=ill,drop=[sex],test=0.25")
    assert (data.name, data.shape, len(data.y_train) + len(data.y_test)) == ("lyon", (1,), 20)
    assert len(data.y_test) == 5
    data = load(f"{tmp_path}/clinics:target=ill")
    assert (data.name, data.shape, data.groups["site"].names) == ("clinics", (3,), ("lyon", "paris"))
    assert default_partition(f"{tmp_path}/clinics:target=ill") == "by-site"
    assert default_partition(f"{tmp_path}/clinics/lyon.csv:target=ill,site=sex") == "by-site"
    assert default_partition(f"{tmp_path}/clinics/lyon.csv:target=ill") == "dirichlet:0.1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "name the target column of .*clinics, as in 'clinics:target=ill'"),
        (":target=sick", "unknown column of site 'lyon' .* 'sick'"),
        (":target=ill,colour=3", "unknown option of tables 'colour'"),
        (":target=ill,site=sex", "unknown option of tables 'site'"),
        (":target", "'target' in data .* is not of the form option=value"),
    ],
)
def test_options_of_tables_that_do_not_fit(tmp_path, options, words):
    write_clinics(tmp_path / "clinics")
    with pytest.raises(HoldfastError, match=words):
        load(f"{tmp_path}/clinics{options}")


def test_a_folder_of_tables_as_an_experiment(tmp_path, monkeypatch):
    write_clinics(tmp_path / "clinics")
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(data="clinics:target=ill", model="linear")
    monkeypatch.chdir("/")
    assert experiment.data == f"{tmp_path}/clinics:target=ill"
    assert experiment.build_federation().clients == 2
    assert Experiment.from_mapping(experiment.describe()) == experiment
