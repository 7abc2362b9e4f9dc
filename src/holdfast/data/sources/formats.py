"""Readers of the file formats in which data sets are published."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError, install
from holdfast.core.random import generator
from holdfast.data.dataset import Group
from holdfast.data.indexing import check_test_share, stratified_split
from holdfast.data.sources.pickles import read_pickled_arrays

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
)
PARTS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev")  # names of folders
DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Arrays:
    """The content of a data set: samples, targets, names of classes, groups, and the task, if not classes."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...] | None
    groups: Mapping[str, Group] = field(default_factory=dict)
    task: str | None = None


def import_optional(module: str, package: str) -> Any:
    """Import a module that only some formats need."""
    try:
        return import_module(module)
    except ImportError as error:
        raise HoldfastError(f"this file needs {package}: {install('data')}") from error


# IDX: MNIST and data sets in its format.

_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> np.ndarray:
    """The array of a gzipped IDX file, in native byte order."""
    with gzip.open(path) as stream:
        content = stream.read()
    dimensions = content[3]
    if content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise HoldfastError(f"{path} is not an IDX file")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(np.int64)
    values = np.frombuffer(content, _IDX_TYPES[content[2]], offset=4 + 4 * dimensions)
    return values.reshape(shape).astype(values.dtype.newbyteorder("="))


def read_mnist(folder: Path, classes: tuple[str, ...]) -> Arrays:
    """MNIST or Fashion-MNIST, from four files."""
    return Arrays(
        read_idx(folder / "train-images-idx3-ubyte.gz"),
        read_idx(folder / "train-labels-idx1-ubyte.gz"),
        read_idx(folder / "t10k-images-idx3-ubyte.gz"),
        read_idx(folder / "t10k-labels-idx1-ubyte.gz"),
        classes,
    )


def read_mnist_writers(folder: Path) -> Group:
    """The writer of each MNIST digit, from QMNIST's label files, whose rows are in MNIST's order.

    A row is (class, NIST series, writer, ...). The test file has 50,000 further rows of digits that MNIST omits.
    """
    train, test = (read_idx(folder / f"qmnist-{part}-labels-idx2-int.gz")[:, 2] for part in ("train", "test"))
    writers, codes = np.unique(np.concatenate((train, test[:10_000])), return_inverse=True)
    names = tuple(f"writer-{writer}" for writer in writers)
    return Group(names, codes[: len(train)], codes[len(train) :])


def read_emnist(folder: Path, split: str) -> Arrays:
    """A split of EMNIST, whose images are stored transposed."""
    x_train, y_train, x_test, y_test = (
        read_idx(folder / f"emnist-{split}-{part}-{what}-ubyte.gz")
        for part in ("train", "test")
        for what in ("images-idx3", "labels-idx1")
    )
    first = 1 if split == "letters" else 0
    return Arrays(
        x_train.transpose(0, 2, 1),
        y_train - first,
        x_test.transpose(0, 2, 1),
        y_test - first,
        EMNIST_CLASSES[split],
    )


_UPPER, _LOWER = (tuple(map(chr, range(ord(first), ord(first) + 26))) for first in "Aa")
EMNIST_CLASSES = {"digits": DIGITS, "letters": _LOWER, "byclass": DIGITS + _UPPER + _LOWER}


# CIFAR's binary version: records of one or two labels and an image.


def _read_records(path: Path, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """The images [N, 3, 32, 32] and the last of each record's ``labels`` [N] of a CIFAR file."""
    records = np.fromfile(path, np.uint8).reshape(-1, labels + 3 * 32 * 32)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].astype(np.int64)


def _read_lines(path: Path) -> tuple[str, ...]:
    return tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line)


def read_cifar10_binary(folder: Path) -> Arrays:
    """CIFAR-10, binary version: five training batches and a test batch."""
    batches = [_read_records(folder / f"data_batch_{i}.bin", 1) for i in range(1, 6)]
    x_train, y_train = (np.concatenate(column) for column in zip(*batches, strict=True))
    names = _read_lines(folder / "batches.meta.txt")
    return Arrays(x_train, y_train, *_read_records(folder / "test_batch.bin", 1), names)


def read_cifar100_binary(folder: Path) -> Arrays:
    """CIFAR-100, binary version, with its 100 fine labels."""
    train, test = (_read_records(folder / f"{part}.bin", 2) for part in ("train", "test"))
    return Arrays(*train, *test, _read_lines(folder / "fine_label_names.txt"))


# CIFAR's Python version and FedBN's digits: pickled arrays.


def _read_batch(path: Path) -> Any:
    return read_pickled_arrays(path.read_bytes(), str(path))


def read_cifar10(folder: Path) -> Arrays:
    """CIFAR-10, Python version: five training batches and a test batch."""
    batches = [_read_batch(folder / f"data_batch_{i}") for i in range(1, 6)]
    test = _read_batch(folder / "test_batch")
    return Arrays(
        np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32),
        np.concatenate([batch["labels"] for batch in batches]),
        test["data"].reshape(-1, 3, 32, 32),
        np.array(test["labels"]),
        tuple(_read_batch(folder / "batches.meta")["label_names"]),
    )


def read_cifar100(folder: Path) -> Arrays:
    """CIFAR-100, Python version, with its 100 fine labels."""
    train, test = _read_batch(folder / "train"), _read_batch(folder / "test")
    return Arrays(
        train["data"].reshape(-1, 3, 32, 32),
        np.array(train["fine_labels"]),
        test["data"].reshape(-1, 3, 32, 32),
        np.array(test["fine_labels"]),
        tuple(_read_batch(folder / "meta")["fine_label_names"]),
    )


def read_fedbn_digits(folder: Path) -> Arrays:
    """A digit domain in FedBN's format: ten pickled training parts of 743 or 744 images, and a test set."""
    parts = [_read_batch(folder / f"partitions/train_part{i}.pkl") for i in range(10)]
    x_test, y_test = _read_batch(folder / "test.pkl")
    x_train, y_train = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Arrays(x_train, y_train.reshape(-1), x_test, y_test.reshape(-1), DIGITS)


# Other formats of arrays.


def read_mat_digits(folder: Path, train: str, test: str) -> Arrays:
    """SVHN's cropped digits and data sets in its format: ``X`` [H, W, 3, N], ``y`` with 10 for the digit 0."""
    loadmat = import_module("scipy.io").loadmat
    files = [loadmat(folder / name, variable_names=("X", "y")) for name in (train, test)]
    (x_train, y_train), (x_test, y_test) = (
        (np.ascontiguousarray(file["X"].transpose(3, 2, 0, 1)), file["y"].reshape(-1) % 10) for file in files
    )
    return Arrays(x_train, y_train, x_test, y_test, DIGITS)


def read_usps_h5(path: Path) -> Arrays:
    """USPS in HDF5: groups train and test with data [N, 256] in 0..1 and target [N]."""
    with import_optional("h5py", "h5py").File(path) as file:
        values = {f"{part}/{what}": file[part][what][:] for part in ("train", "test") for what in file[part]}
    x_train, x_test = (
        np.rint(values[f"{part}/data"] * 255).astype(np.uint8).reshape(-1, 16, 16)
        for part in ("train", "test")
    )
    return Arrays(x_train, values["train/target"], x_test, values["test/target"], DIGITS)


def read_usps_libsvm(folder: Path) -> Arrays:
    """USPS in LIBSVM's text format: pixels in -1..1, label d + 1 for digit d."""
    load = import_module("sklearn.datasets").load_svmlight_file
    (x_train, y_train), (x_test, y_test) = (
        load(str(folder / name), n_features=256) for name in ("usps.bz2", "usps.t.bz2")
    )
    x_train, x_test = (
        np.rint((x.toarray() + 1) * 127.5).astype(np.uint8).reshape(-1, 16, 16) for x in (x_train, x_test)
    )
    return Arrays(x_train, y_train - 1, x_test, y_test - 1, DIGITS)


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x_train, y_train, x_test and y_test from a NumPy archive."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            if missing := [name for name in names if name not in file]:
                raise HoldfastError(
                    f"{path} has no array called {' or '.join(missing)}; it must hold {', '.join(names)}"
                )
            return file["x_train"], file["y_train"], file["x_test"], file["y_test"]
    except HoldfastError:
        raise
    except Exception as error:  # a damaged archive may raise any error in zipfile, zlib and NumPy
        raise HoldfastError(f"{path} cannot be read as a .npz file of plain arrays: {error}") from error


def read_digits_npz(path: Path) -> Arrays:
    """A digit domain in a NumPy archive."""
    return Arrays(*read_npz(path), classes=DIGITS)


def read_mnist_m_tensors(folder: Path) -> Arrays:
    """MNIST-M as pairs of tensors (images [N, 28, 28, 3], labels [N])."""
    import torch

    (x_train, y_train), (x_test, y_test) = (
        torch.load(folder / f"mnist_m_{part}.pt", weights_only=True) for part in ("train", "test")
    )
    return Arrays(x_train.numpy(), y_train.numpy(), x_test.numpy(), y_test.numpy(), DIGITS)


def read_embedded_digits() -> Arrays:
    """scikit-learn's 1,797 digits of 8x8 pixels, with a fifth of each class for testing."""
    digits = import_module("sklearn.datasets").load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    train, test = stratified_split(digits.target, generator(0, "digits split"))
    return Arrays(images[train], digits.target[train], images[test], digits.target[test], DIGITS)


def read_femnist(folder: Path) -> Arrays:
    """FEMNIST in LEAF's format: JSON files in train/ and test/, by writer, pixels in 0..1."""
    parts = {}
    writer_codes: dict[str, int] = {}
    for part in ("train", "test"):
        images, labels, writers = [], [], []
        for path in sorted((folder / part).glob("*.json")):
            with path.open(encoding="utf-8") as stream:
                content = json.load(stream)
            for user in content["users"]:
                data = content["user_data"][user]
                pixels = np.array(data["x"], np.float32).reshape(-1, 28, 28)
                images.append(np.rint(pixels * 255).astype(np.uint8))
                labels.append(np.array(data["y"], np.int64))
                code = writer_codes.setdefault(user, len(writer_codes))
                writers.append(np.full(len(pixels), code, np.int64))
        if not images:
            raise HoldfastError(f"{folder / part} holds no LEAF .json file with users in it")
        parts[part] = [np.concatenate(column) for column in (images, labels, writers)]
    (x_train, y_train, train_writers), (x_test, y_test, test_writers) = parts["train"], parts["test"]
    group = Group(tuple(writer_codes), train_writers, test_writers)
    return Arrays(x_train, y_train, x_test, y_test, EMNIST_CLASSES["byclass"], {"writer": group})


# Folders of images.


def read_images(
    paths: Sequence[Path], size: tuple[int, int] | None = None, mode: str | None = None
) -> np.ndarray:
    """Decode images into one array uint8 ``[N, 1 or 3, height, width]``.

    ``size`` (height, width) resizes them; without it all must have the same size. ``mode`` is ``"L"`` (grey) or
    ``"RGB"``; by default they are grey if all of them are.
    """
    image = import_optional("PIL.Image", "Pillow")
    if size is None or mode is None:
        size, mode = _common_form(image, paths, size, mode)
    channels = 1 if mode == "L" else 3
    out = np.empty((len(paths), *size, channels), np.uint8)

    def decode(position: int) -> None:
        try:
            with image.open(paths[position]) as opened:
                picture = opened.convert(mode)
        except Exception as error:  # a damaged image may raise any error in its decoder
            raise HoldfastError(f"{paths[position]} cannot be read as an image: {error}") from error
        if picture.size != size[::-1]:
            picture = picture.resize(size[::-1], image.Resampling.BILINEAR)
        out[position] = np.asarray(picture).reshape(out.shape[1:])

    with ThreadPoolExecutor() as pool:
        # Decoding releases the GIL; iterating over the results raises the first error.
        for _ in pool.map(decode, range(len(paths)), chunksize=64):
            pass
    return out.transpose(0, 3, 1, 2)


def _common_form(
    image: Any, paths: Iterable[Path], size: tuple[int, int] | None, mode: str | None
) -> tuple[tuple[int, int], str]:
    """``size`` and ``mode``, by default those that all images have in common; reads headers only."""
    first: tuple[Path, tuple[int, int]] | None = None
    grey = True
    for path in paths:
        try:
            with image.open(path) as opened:
                found = opened.size[::-1]
                grey = grey and opened.mode in ("1", "L")
        except Exception as error:  # as above
            raise HoldfastError(f"{path} cannot be read as an image: {error}") from error
        first = first or (path, found)
        if size is None and found != first[1]:
            raise HoldfastError(
                f"images differ in size: {first[0]} is {first[1][0]}x{first[1][1]}, {path} is "
                f"{found[0]}x{found[1]}; make them equal, or read them in Python with "
                f"hf.Dataset.from_folder(..., size={first[1]})"
            )
    if first is None:
        raise HoldfastError("there are no images to read")
    return size or first[1], mode or ("L" if grey else "RGB")


def list_classes(folder: Path) -> tuple[str, ...]:
    """The classes of a folder with one subfolder per class, sorted."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."))


def list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """All images in the classes' folders, sorted within each class, and their labels."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        paths += found
        labels += [label] * len(found)
    return paths, np.array(labels, np.int64)


def _is_part(folder: Path) -> bool:
    """Whether this is a folder of classes, such as a training set, and not itself a class called "train"."""
    return folder.name.lower() in PARTS and bool(list_classes(folder))


def read_folder(path: Path, size: tuple[int, int] | None, seed: int, share: float = 0.2) -> Arrays:
    """Images in train/CLASS/ and test/CLASS/, or in CLASS/ only, of which a share is for testing."""
    check_test_share(share)
    if not path.is_dir():
        raise HoldfastError(f"there is no folder {path}")
    if size is not None and np.shape(size) != (2,):
        raise HoldfastError(f"size is {size!r}; it must be a height and a width, such as (64, 64)")
    split = (path / "train").is_dir() and (path / "test").is_dir()
    classes = list_classes(path / "train" if split else path)
    if not split and (part := next((name for name in classes if _is_part(path / name)), None)):
        raise HoldfastError(
            f"{path} has a folder '{part}' with folders in it, but not both 'train' and 'test'; use these names, "
            "or only CLASS/*.png, from which a test share is drawn"
        )
    if split and (unknown := set(list_classes(path / "test")) - set(classes)):
        raise HoldfastError(f"{path / 'test'} has classes that train lacks: {', '.join(sorted(unknown))}")
    parts = [list_images(path / part, classes) for part in (("train", "test") if split else ("",))]
    if not all(len(labels) for _, labels in parts):
        raise HoldfastError(
            f"{path} has no images laid out as train/CLASS/*.png and test/CLASS/*.png, or as CLASS/*.png"
        )
    images = read_images([image for paths, _ in parts for image in paths], size)
    labels = np.concatenate([labels for _, labels in parts])
    if split:
        train, test = np.split(np.arange(len(labels)), [len(parts[0][1])])
    else:
        train, test = stratified_split(labels, generator(seed, "folder split"), share)
    return Arrays(images[train], labels[train], images[test], labels[test], classes)


def read_cinic10(folder: Path) -> Arrays:
    """CINIC-10's train and test folders, 90,000 images each; valid is left out, as in FedNTD."""
    classes = list_classes(folder / "train")
    train, y_train = list_images(folder / "train", classes)
    test, y_test = list_images(folder / "test", classes)
    x_train, x_test = (read_images(paths, (32, 32), "RGB") for paths in (train, test))
    return Arrays(x_train, y_train, x_test, y_test, classes)


def read_tiny_imagenet(folder: Path) -> Arrays:
    """Tiny-ImageNet, whose classes are WordNet ids; the test set is its labelled validation set."""
    classes = list_classes(folder / "train")
    train, y_train = list_images(folder / "train", classes)
    label_of = {name: label for label, name in enumerate(classes)}
    rows = [line.split("\t") for line in (folder / "val/val_annotations.txt").read_text("utf-8").splitlines()]
    x_test = read_images([folder / "val/images" / row[0] for row in rows], (64, 64), "RGB")
    y_test = np.array([label_of[row[1]] for row in rows])
    return Arrays(read_images(train, (64, 64), "RGB"), y_train, x_test, y_test, classes)


def read_mnist_m_folder(folder: Path) -> Arrays:
    """MNIST-M in its first format: PNG files of 32x32 pixels, and text files with the digit of each."""

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        rows = [
            line.split() for line in (folder / f"mnist_m_{part}_labels.txt").read_text("utf-8").splitlines()
        ]
        paths = [folder / f"mnist_m_{part}" / file for file, _ in rows]
        return read_images(paths, (32, 32), "RGB"), np.array([int(digit) for _, digit in rows])

    return Arrays(*read("train"), *read("test"), classes=DIGITS)
