"""The data sets that can be found: their files, addresses and hashes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nclbayes.tasks.formats import unpack_cifar, unpack_strokes


@dataclass(frozen=True)
class DataFile:
    """A file that a data set needs.

    Attributes:
        key: What :func:`find` calls it.
        places: Where it may lie below a folder of data; a download goes to the first.
        sha256: Of its content (what a gzip file unpacks to, the arrays of an npz file), if known.
        published: Of the file itself as it is offered for download, such as "md5:...", if that is all that is known.
        urls: Where it can be had, the best first.
    """

    key: str
    places: tuple[str, ...]
    sha256: str | None = None
    published: str | None = None
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Archive:
    """What the files of a data set can be unpacked from.

    Attributes:
        places: Where it may lie below a folder of data (a folder counts too); a download goes to the first.
        urls: Where it can be had.
        unpack: ``unpack(archive, folder)`` writes the data set's files below a folder.
        published: Its hash, such as "sha256:...", if known.
    """

    places: tuple[str, ...]
    urls: tuple[str, ...]
    unpack: Callable[[Path, Path], None]
    published: str | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set: its files, and the archive that holds them if there is one.

    Attributes:
        name: What to call it.
        files: All that is needed.
        archive: Where the files come from if they cannot be had one by one.
    """

    name: str
    files: tuple[DataFile, ...]
    archive: Archive | None = None


def _idx_files(
    folders: Iterable[str], mirrors: Iterable[str], sha256: Iterable[str | None], published: Iterable[str | None]
) -> tuple[DataFile, ...]:
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        DataFile(
            key,
            tuple(f"{folder}{name}-ubyte{ending}" for folder in folders for ending in (".gz", "")),
            content,
            packed,
            tuple(f"{mirror}{name}-ubyte.gz" for mirror in mirrors),
        )
        for key, name, content, packed in zip(keys, names, sha256, published, strict=True)
    )


def _bin_files(folder: str, sha256: dict[str, str]) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(name.removesuffix(".bin"), (f"{folder}/{name}", name), digest) for name, digest in sha256.items()
    )


_MNIST = DataSet(
    "mnist",
    _idx_files(
        ("mnist/", "MNIST/raw/", ""),
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        (None,) * 4,
    ),
)
# Not looked for in the folder itself: its files have the same names as MNIST's.
_FASHION_MNIST = DataSet(
    "fashion-mnist",
    _idx_files(
        ("fashion-mnist/", "FashionMNIST/raw/"),
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (None,) * 4,
        (
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
            "md5:bef4ecab320f06d8554ea6380940ec79",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
)
_CIFAR10 = DataSet(
    "cifar10",
    _bin_files(
        "cifar-10-batches-bin",
        {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    Archive(
        ("cifar-10-binary.tar.gz",),
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        unpack_cifar,
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
)
_CIFAR100 = DataSet(
    "cifar100",
    _bin_files(
        "cifar-100-binary",
        {
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ),
    Archive(
        ("cifar-100-binary.tar.gz",),
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
        unpack_cifar,
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
)
_STROKE_MNIST = DataSet(
    "stroke-mnist",
    (
        DataFile(
            "strokes",
            ("stroke-mnist.npz", "stroke-mnist/stroke-mnist.npz"),
            "272750a8dbba7100d15ad41e34ad3b00678b11ddcd046f569f0c1137ef3bcd11",
        ),
    ),
    Archive(
        ("sequences.tar.gz", "sequences", "stroke-mnist/sequences.tar.gz", "stroke-mnist/sequences"),
        ("https://github.com/edwin-de-jong/mnist-digits-stroke-sequence-data/raw/master/sequences.tar.gz",),
        unpack_strokes,
    ),
)
DATASETS = {each.name: each for each in (_MNIST, _FASHION_MNIST, _CIFAR10, _CIFAR100, _STROKE_MNIST)}
"""Every data set that can be found, by name."""
