"""Files that are complete or not there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nclbayes.errors import FileError
from nclbayes.storage import read_file, write_file
from tests.storage.hostile import Failing


def test_a_file_is_plain_safetensors_and_comes_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5, dtype=torch.float64),
        "scalar": torch.tensor(1.5),
        "transposed": torch.randn(3, 2).T,
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    write_file(tmp_path / "f", "thing", tensors, {"x": [1, 2], "y": None})
    found, settings = read_file(tmp_path / "f", "thing")
    assert settings == {"x": [1, 2], "y": None}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(load_file(tmp_path / "f")[name], tensor) for name, tensor in tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    with pytest.raises(FileError, match="holds a thing, not a posterior"):
        read_file(tmp_path / "f", "posterior")


def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_file(path, "thing", {"a": torch.ones(10)}, {})
    child = textwrap.dedent(f"""
        import resource, signal, torch
        from nclbayes.errors import FileError
        from nclbayes.storage import write_file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write_file({str(path)!r}, "thing", {{"a": torch.ones(1_000_000)}}, {{}})
        except FileError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert "Could not write" in done.stdout
    assert "untouched" in done.stdout
    assert torch.equal(read_file(path, "thing")[0]["a"], torch.ones(10))
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_disk_that_fails_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "f", "thing", {}, {})
    monkeypatch.setattr("nclbayes.storage.reading.os.fdopen", Failing)
    with pytest.raises(FileError, match=r"Could not read .*f': Input/output error"):
        read_file(tmp_path / "f", "thing")


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere"):
        write_file(tmp_path / "nowhere" / "f", "thing", {}, {})


@pytest.mark.slow
def test_saving_and_loading_do_not_double_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "f"
    child = textwrap.dedent(f"""
        import resource, sys
        import pyro.distributions as dist, torch
        import nclbayes as ncl
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        net = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(8)))
        model = ncl.BayesianNetwork(net, ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        task = ncl.Task((torch.zeros(2, 1000), torch.zeros(2, 1000)), name="zeros")
        if sys.argv[1] == "save":
            posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(), example=task)
            before = peak()
            posterior.save({str(path)!r})
        else:
            before = peak()
            ncl.OnlinePosterior.load({str(path)!r}, model)
        print(peak() - before)
    """)
    grown = {}
    for verb in ("save", "load"):
        done = subprocess.run([sys.executable, "-c", child, verb], capture_output=True, text=True, check=True)
        grown[verb] = float(done.stdout)
    # Means, and two factors of each layer with their inverses and roots, MiB; of the factors the file has a triangle.
    held, size = 8 * 1000 * 1001 * (4 + 6 * 8) / 2**20, path.stat().st_size / 2**20
    assert size < 0.25 * held
    assert grown["save"] < size
    assert grown["load"] < 1.2 * held


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.bfloat16, torch.float16])
def test_small_numbers_are_kept_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.tensor([1, 2, -3]).to(dtype)
    write_file(tmp_path / "f", "thing", {"x": value}, {})
    tensors, _ = read_file(tmp_path / "f", "thing")
    assert tensors["x"].dtype == dtype
    assert torch.equal(tensors["x"], value)


def test_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"'x' is a tensor of torch\.complex64"):
        write_file(tmp_path / "f", "thing", {"x": torch.zeros(2, dtype=torch.complex64)}, {})
