"""The data sets known by name: their published files, folders and readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.data.dataset import Group
from holdfast.data.sources import federations, formats
from holdfast.data.sources.files import File
from holdfast.data.sources.formats import Arrays


@dataclass(frozen=True)
class FileLayout:
    """A set of files in which a data set is published.

    ``home`` is the folder of its files in a search root; the folders ``also`` are searched too. If ``archives`` are
    given, unpacking them in ``home`` creates the files.
    """

    home: str
    files: tuple[File, ...]
    read: Callable[[Path], Arrays]
    archives: tuple[File, ...] = ()
    also: tuple[str, ...] = ()
    is_partial: bool = False
    """Whether it holds only some of the samples; `describe` then reads it to count them."""


@dataclass(frozen=True)
class Source:
    """A data set known by name. Sizes and shape are those of its first layout; without classes, ``classes`` is 0."""

    name: str
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    page: str
    layouts: tuple[FileLayout, ...]
    licence: str | None = None
    embedded: Callable[[], Arrays] | None = None
    writers: tuple[tuple[File, ...], Callable[[Path], Group]] | None = None
    """Files of the writer of each sample, in a folder NAME-writers, and their reader; optional."""
    installed: Path | None = None
    """The folder in which an operating system's package installs the first layout's files."""
    partition: str | None = None
    """The default partition of this data."""


def _idx(address: str, names_and_sums: dict[str, str | None]) -> tuple[File, ...]:
    return tuple(File(name, address + name, md5) for name, md5 in names_and_sums.items())


def _emnist(name: str, split: str, classes: int, train: int, test: int) -> Source:
    files = tuple(
        File(f"emnist-{split}-{part}-{what}-ubyte.gz")
        for part in ("train", "test")
        for what in ("images-idx3", "labels-idx1")
    )
    archive = File(
        "gzip.zip",
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "58c8d27c78d21e728a6bc7b3cc06412e",
    )
    return Source(
        name,
        classes=classes,
        shape=(1, 28, 28),
        train=train,
        test=test,
        page="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        layouts=(
            FileLayout(
                "emnist",
                files,
                partial(formats.read_emnist, split=split),
                (archive,),
                also=("emnist/gzip",),
            ),
        ),
        licence="public domain (NIST)",
    )


def _digit_domain(name: str, fedbn_name: str) -> tuple[FileLayout, ...]:
    """The file layouts in which studies on several digit domains publish their data."""
    fedbn = (*(f"partitions/train_part{i}.pkl" for i in range(10)), "test.pkl")
    return (
        FileLayout(
            name,
            (File(f"{name}.npz"),),
            lambda folder: formats.read_digits_npz(folder / f"{name}.npz"),
            also=("domains",),
            is_partial=True,
        ),
        FileLayout(
            f"digit_dataset/{fedbn_name}",
            tuple(File(file) for file in fedbn),
            formats.read_fedbn_digits,
            also=(fedbn_name,),
            is_partial=True,
        ),
    )


_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_MNIST_M = "https://github.com/liyxi/mnist-m/releases/download/data/"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
_FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/"
_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_HOSPITALS = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
_SVHN = "http://ufldl.stanford.edu/housenumbers/"

_SOURCES = (
    Source(
        "digits",
        classes=10,
        shape=(1, 8, 8),
        train=1438,
        test=359,
        page="https://archive.ics.uci.edu/dataset/80",
        layouts=(),
        licence="CC BY 4.0",
        embedded=formats.read_embedded_digits,
    ),
    Source(
        "mnist",
        classes=10,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        page="http://yann.lecun.com/exdb/mnist/",
        layouts=(
            FileLayout(
                "mnist",
                _idx(
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    {
                        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
                    },
                ),
                partial(formats.read_mnist, classes=formats.DIGITS),
                also=("MNIST/raw",),
            ),
        ),
        licence="CC BY-SA 3.0",
        writers=(
            _idx(
                _QMNIST,
                {
                    "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
                    "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
                },
            ),
            formats.read_mnist_writers,
        ),
    ),
    Source(
        "fashion-mnist",
        classes=10,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        page="https://github.com/zalandoresearch/fashion-mnist",
        layouts=(
            FileLayout(
                "fashion-mnist",
                _idx(
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                    {
                        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
                    },
                ),
                partial(formats.read_mnist, classes=_FASHION),
                also=("FashionMNIST/raw",),
            ),
        ),
        licence="MIT",
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    Source(
        "cifar10",
        classes=10,
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=(
            FileLayout(
                "cifar10",
                (
                    File("data_batch_1.bin", md5="5dd7e06a14cb22eb9f671a540d1b7c25"),
                    File("data_batch_2.bin", md5="5ea93a67294ea407fff1d09f752e9692"),
                    File("data_batch_3.bin", md5="942cd6a4bcdd0dd3c604fbe906cb4421"),
                    File("data_batch_4.bin", md5="ae636b3ba5c66a11e91e8cb52e771fcb"),
                    File("data_batch_5.bin", md5="53f37980c15c3d472c316c40844f3f0d"),
                    File("test_batch.bin", md5="803d5f7f4d78ea53de84dbe85f74fb6d"),
                    File("batches.meta.txt"),
                ),
                formats.read_cifar10_binary,
                (
                    File(
                        "cifar-10-binary.tar.gz",
                        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                        "c32a1d4ab5d03f1284b67883e8d87530",
                    ),
                ),
                also=("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
            ),
            FileLayout(
                "cifar10",
                (
                    File("data_batch_1", md5="c99cafc152244af753f735de768cd75f"),
                    File("data_batch_2", md5="d4bba439e000b95fd0a9bffe97cbabec"),
                    File("data_batch_3", md5="54ebc095f3ab1f0389bbae665268c751"),
                    File("data_batch_4", md5="634d18415352ddfa80567beed471001a"),
                    File("data_batch_5", md5="482c414d41f54cd18b22e5b47cb7c3cb"),
                    File("test_batch", md5="40351d587109b95175f43aff81a1287e"),
                    File("batches.meta", md5="5ff9c542aee3614f3951f8cda6e48888"),
                ),
                formats.read_cifar10,
                (
                    File(
                        "cifar-10-python.tar.gz",
                        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                        "c58f30108f718f92721af3b95e74349a",
                    ),
                ),
                also=("cifar10/cifar-10-batches-py", "cifar-10-batches-py"),
            ),
        ),
    ),
    Source(
        "cifar100",
        classes=100,
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=(
            FileLayout(
                "cifar100",
                (
                    File("train.bin", md5="6172c7755cfe09b2fe270c85cebc1b15"),
                    File("test.bin", md5="4499cfba6c016c1be1438163640a0898"),
                    File("fine_label_names.txt"),
                ),
                formats.read_cifar100_binary,
                (
                    File(
                        "cifar-100-binary.tar.gz",
                        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                        "03b5dce01913d631647c71ecec9e9cb8",
                    ),
                ),
                also=("cifar100/cifar-100-binary", "cifar-100-binary"),
            ),
            FileLayout(
                "cifar100",
                (
                    File("train", md5="16019d7e3df5f24257cddd939b257f8d"),
                    File("test", md5="f0ef6b0ae62326f3e7ffdfab6717acfc"),
                    File("meta", md5="7973b15100ade9c7d40fb424638fde48"),
                ),
                formats.read_cifar100,
                (
                    File(
                        "cifar-100-python.tar.gz",
                        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                        "eb9058c3a382ffc7106e4002c42a8d85",
                    ),
                ),
                also=("cifar100/cifar-100-python", "cifar-100-python"),
            ),
        ),
    ),
    Source(
        "cinic10",
        classes=10,
        shape=(3, 32, 32),
        train=90_000,
        test=90_000,
        page="https://datashare.ed.ac.uk/handle/10283/3192",
        layouts=(
            FileLayout(
                "cinic10",
                (File("train"), File("test")),
                formats.read_cinic10,
                (
                    File(
                        "CINIC-10.tar.gz",
                        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                        "6ee4d0c996905fe93221de577967a372",
                    ),
                ),
                also=("CINIC-10",),
            ),
        ),
    ),
    _emnist("emnist", "digits", 10, 240_000, 40_000),
    _emnist("emnist-letters", "letters", 26, 124_800, 20_800),
    _emnist("emnist-byclass", "byclass", 62, 697_932, 116_323),
    Source(
        "femnist",
        classes=62,
        shape=(1, 28, 28),
        # All samples, nine tenths of them for training; the options of LEAF's script may select fewer.
        train=724_700,
        test=80_563,
        page="https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
        layouts=(
            FileLayout(
                "femnist",
                (File("train"), File("test")),
                formats.read_femnist,
                also=("femnist/data", "leaf/data/femnist/data"),
            ),
        ),
        licence="public domain (NIST)",
    ),
    Source(
        "usps",
        classes=10,
        shape=(1, 16, 16),
        train=7291,
        test=2007,
        page=_LIBSVM.removesuffix("multiclass/") + "multiclass.html#usps",
        layouts=(
            FileLayout(
                "usps",
                (
                    File("usps.bz2", _LIBSVM + "usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197"),
                    File("usps.t.bz2", _LIBSVM + "usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118"),
                ),
                formats.read_usps_libsvm,
            ),
            FileLayout("usps", (File("usps.h5"),), lambda folder: formats.read_usps_h5(folder / "usps.h5")),
        ),
    ),
    Source(
        "svhn",
        classes=10,
        shape=(3, 32, 32),
        train=73_257,
        test=26_032,
        page=_SVHN,
        layouts=(
            FileLayout(
                "svhn",
                (
                    File("train_32x32.mat", _SVHN + "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
                    File("test_32x32.mat", _SVHN + "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
                ),
                partial(formats.read_mat_digits, train="train_32x32.mat", test="test_32x32.mat"),
                also=("SVHN",),
            ),
            *_digit_domain("svhn", "SVHN"),
        ),
        licence="non-commercial use only",
    ),
    Source(
        "mnist-m",
        classes=10,
        shape=(3, 28, 28),
        train=60_000,
        test=10_000,
        page="https://github.com/liyxi/mnist-m",
        layouts=(
            FileLayout(
                "mnist-m",
                (File("mnist_m_train.pt"), File("mnist_m_test.pt")),
                formats.read_mnist_m_tensors,
                (
                    File(
                        "mnist_m_train.pt.tar.gz",
                        _MNIST_M + "mnist_m_train.pt.tar.gz",
                        "191ed53db9933bd85cc9700558847391",
                    ),
                    File(
                        "mnist_m_test.pt.tar.gz",
                        _MNIST_M + "mnist_m_test.pt.tar.gz",
                        "e11cb4d7fff76d7ec588b1134907db59",
                    ),
                ),
            ),
            FileLayout(
                "mnist-m",
                (
                    File("mnist_m_train"),
                    File("mnist_m_train_labels.txt"),
                    File("mnist_m_test"),
                    File("mnist_m_test_labels.txt"),
                ),
                formats.read_mnist_m_folder,
                also=("mnist-m/mnist_m", "mnist_m"),
            ),
            *_digit_domain("mnist-m", "MNIST_M"),
        ),
    ),
    Source(
        "synth-digits",
        classes=10,
        shape=(3, 32, 32),
        train=479_400,
        test=9_553,
        page="http://yaroslav.ganin.net/",
        layouts=(
            FileLayout(
                "synth-digits",
                (File("synth_train_32x32.mat"), File("synth_test_32x32.mat")),
                partial(formats.read_mat_digits, train="synth_train_32x32.mat", test="synth_test_32x32.mat"),
                also=("SynthDigits",),
            ),
            *_digit_domain("synth-digits", "SynthDigits"),
        ),
    ),
    Source(
        "tiny-imagenet",
        classes=200,
        shape=(3, 64, 64),
        train=100_000,
        test=10_000,
        page="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        layouts=(
            FileLayout(
                "tiny-imagenet",
                (File("train"), File("val/images"), File("val/val_annotations.txt")),
                formats.read_tiny_imagenet,
                (
                    File(
                        "tiny-imagenet-200.zip",
                        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                        "90528d7ca1a48142e341f4ef8d21d0de",
                    ),
                ),
                also=("tiny-imagenet/tiny-imagenet-200", "tiny-imagenet-200"),
            ),
        ),
        licence="non-commercial research (ImageNet's terms)",
    ),
    Source(
        "heart-disease",
        classes=2,
        shape=(13,),
        train=486,
        test=254,
        page="https://archive.ics.uci.edu/dataset/45/heart+disease",
        layouts=(
            FileLayout(
                "heart-disease",
                _idx(_UCI, {f"processed.{name}.data": md5 for name, md5 in _HOSPITALS.items()}),
                federations.read_heart_disease,
            ),
            FileLayout(  # with a line of names; Cleveland's file from Kaggle
                "federations/heart-disease",
                tuple(File(f"processed.{name}.data") for name in _HOSPITALS),
                federations.read_heart_disease,
            ),
        ),
        licence="CC BY 4.0",
        partition="by-site",
    ),
    Source(
        "tcga-brca",
        classes=0,
        shape=(39,),
        train=866,
        test=222,
        page="https://github.com/owkin/FLamby",
        layouts=(
            FileLayout(
                "tcga-brca",
                (
                    File("brca.csv", f"{_FLAMBY}brca.csv", "989df4ddec084f749d9593146d7ba92f"),
                    File(
                        "train_test_split.csv",
                        f"{_FLAMBY}dataset_creation_scripts/train_test_split.csv",
                        "e648057e47463ee7763924d779cd7f2d",
                    ),
                ),
                federations.read_tcga_brca,
                also=("federations/tcga-brca",),
            ),
        ),
        licence="GDC's data access policy (no attempt to identify participants)",
        partition="by-site",
    ),
    Source(
        "shakespeare",
        classes=65,
        shape=(80,),
        train=10_125,
        test=2_544,
        page="https://github.com/karpathy/char-rnn",
        layouts=(
            FileLayout(
                "shakespeare",
                (File("input.txt", _SHAKESPEARE, "6fb458f1232090904fb40fe944165e91"),),
                federations.read_shakespeare,
                also=("federations/shakespeare",),
            ),
        ),
        licence="public domain",
        partition="by-site",
    ),
)

DATASETS: dict[str, Source] = {source.name: source for source in _SOURCES}
"""Every data set known by name."""
