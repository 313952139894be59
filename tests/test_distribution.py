"""What a stranger gets: packages with all that belongs to them, and ranges of versions that are told in one way."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import nclbayes

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def project() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_lowest_versions_are_the_bounds() -> None:
    found = project()
    extras = found["optional-dependencies"]
    bounds = [*found["dependencies"], *extras["experiments"], *extras["cluster"], *extras["test"]]
    lowest = dict(bound.split(">=") for bound in bounds if not bound.startswith("nclbayes["))
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-lowest.txt").read_text(), flags=re.MULTILINE))
    assert pins.keys() == lowest.keys()
    for name, pin in pins.items():
        assert re.fullmatch(rf"{re.escape(lowest[name])}(\.0)*", pin), name


def test_the_package_imports_whatever_it_requires() -> None:
    text = "\n".join(path.read_text() for path in Path(nclbayes.__file__).parent.rglob("*.py"))
    modules = {"pyro-ppl": "pyro"}
    for bound in project()["dependencies"]:
        name = bound.partition(">=")[0]
        assert re.search(rf"^ *(import|from) {modules.get(name, name)}\b", text, flags=re.MULTILINE), name


def test_every_python_that_is_promised_is_tested() -> None:
    promised = [c.rpartition(" ")[2] for c in project()["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert project()["requires-python"] == f">={promised[0]}"
    (tested,) = re.findall(r"python: \[(.*)\]", WORKFLOW.read_text())
    assert re.findall(r'"([\d.]+)"', tested) == promised


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and with the wheel that is built from it."""
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool, reason="part of the extra dev")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.mark.slow
def test_the_sdist_has_every_file_that_git_keeps(built: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no clone")
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert not {name for name in listed.stdout.splitlines() if (ROOT / name).exists()} - found


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    (path,) = built.glob("*.whl")
    assert path.name == f"nclbayes-{nclbayes.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = message_from_bytes(archive.read(f"nclbayes-{nclbayes.__version__}.dist-info/METADATA"))
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "nclbayes").rglob("*.py")}
    layers = "nclbayes/tasks/cifar10-features-epochs-100-seed-0.safetensors"
    assert {name for name in names if ".dist-info/" not in name} == modules | {"nclbayes/py.typed", layers}
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
