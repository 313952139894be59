"""Small files in the formats that the real data come in."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def write_idx(path: Path, array: np.ndarray, zipped: bool = True) -> Path:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def write_mnist(folder: Path, train: int = 20, test: int = 5) -> None:
    """So many images of each digit; every pixel of image i is i modulo 256."""
    for prefix, each in (("train", train), ("t10k", test)):
        labels = np.tile(np.arange(10), each)
        pixels = np.arange(labels.size)[:, None, None] % 256
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", np.broadcast_to(pixels, (labels.size, 28, 28)))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)


def cifar_rows(classes: int, each: int, label_bytes: int, seed: int = 0) -> np.ndarray:
    """Records of random images, so many of each class."""
    random = np.random.default_rng(seed)
    labels = np.tile(np.arange(classes), each)[:, None]
    coarse = labels[:, : label_bytes - 1] // 5
    return np.hstack([coarse, labels, random.integers(0, 256, (labels.size, 3072))]).astype(np.uint8)


def write_cifar100(folder: Path, train: int = 3, test: int = 2) -> None:
    (folder / "cifar-100-binary").mkdir(parents=True)
    cifar_rows(100, train, 2).tofile(folder / "cifar-100-binary" / "train.bin")
    cifar_rows(100, test, 2, seed=1).tofile(folder / "cifar-100-binary" / "test.bin")


def write_cifar10(folder: Path, each: int = 2) -> None:
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        cifar_rows(10, each, 1, seed=i).tofile(folder / "cifar-10-batches-bin" / f"{name}.bin")


def stroke_digits(each: int = 4) -> dict[str, list[np.ndarray]]:
    """Digits with lengths from 6 to 15; the label is the index modulo 10, dx = 1 and dy = -1 inside."""
    digits: dict[str, list[np.ndarray]] = {}
    for split in ("train", "test"):
        digits[split] = []
        for i in range(10 * each):
            steps = np.tile(np.array([1, -1, 0, 0], dtype=np.int8), (6 + i % 10, 1))
            steps[0], steps[-1] = (9, 12, 0, 0), (0, 0, 1, 1)
            digits[split].append(steps)
    return digits


def write_strokes(path: Path, each: int = 4) -> Path:
    arrays: dict[str, np.ndarray] = {}
    for split, digits in stroke_digits(each).items():
        arrays[f"{split}_steps"] = np.concatenate(digits)
        arrays[f"{split}_offsets"] = np.cumsum([0, *map(len, digits)], dtype=np.int64)
        arrays[f"{split}_labels"] = (np.arange(len(digits)) % 10).astype(np.uint8)
    np.savez_compressed(path, **arrays)
    return path


def write_stroke_texts(folder: Path, each: int = 4) -> Path:
    """The official layout."""
    folder.mkdir(parents=True)
    for split, digits in stroke_digits(each).items():
        for i, steps in enumerate(digits):
            lines = "".join(" ".join(map(str, row)) + "\n" for row in steps.tolist())
            (folder / f"{split}img-{i}-inputdata.txt").write_text(lines)
            (folder / f"{split}img-{i}-points.txt").write_text("x,y\n1,2\n")
        (folder / f"{split}labels.txt").write_text("".join(f"{i % 10}\n" for i in range(len(digits))))
    return folder
