"""Records, configurations and results are read by their schemas: whatever else a file holds is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

from nclbayes import Record, Score
from nclbayes.errors import FileError
from nclbayes.experiments import RunConfig
from nclbayes.experiments.tuning import Tuned
from tests.storage.hostile import HOSTILE_TEXTS, Failing, objection, variants, with_value


def a_record(path: Path) -> None:
    record = Record(["a", "b"], baseline=[0.5, 0.5], about={"seed": 0})
    record.add([Score(0.9, 0.3, float("nan"), 10)], [1.0, 0.5], 2.0, -7.5)
    record.add([Score(0.8, 0.4, 0.1, 10), Score(0.9, 0.3, 0.1, 10)], [1.0], 2.0)
    record.save(path)


def a_configuration(path: Path) -> None:
    RunConfig.of("split-digits", "laplace-ncl", settings={"steps": 5}, tasks=2).save(path)


def a_result(path: Path) -> None:
    Tuned("split-digits", "owm", "domain", {"alpha": 0.1}, 0.9, [{"alpha": 0.1, "score": 0.9}]).save(path)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "record": (a_record, Record.load),
    "configuration": (a_configuration, RunConfig.load),
    "result": (a_result, Tuned.load),
}


def is_deep(value: Any) -> bool:
    return isinstance(value, list) and value != [None]


def is_free(kind: str, where: tuple[Any, ...], value: Any) -> bool:
    """Whether such a value may stand there after all."""
    if kind == "record":
        in_numbers = where[0] in ("scores", "losses", "seconds", "baseline", "evidence") and where[-1] != "examples"
        if where[0] == "evidence" and len(where) == 2 and value is None:
            return True
        anything = where[0] == "about" and (len(where) > 1 or isinstance(value, dict)) and not is_deep(value)
        return anything or (in_numbers and isinstance(value, float))
    if kind == "result" and where[0] == "trials":
        return (len(where) > 2 and not is_deep(value)) or (len(where) == 2 and isinstance(value, dict))
    if kind == "result" and where == ("values",):
        return isinstance(value, dict)
    if kind == "configuration" and where[0] == "settings":
        return where[1:] in ((), ("patience",), ("trust_radius",)) and value is None
    if kind == "configuration" and where[0] in ("size", "tasks", "num_samples", "units"):
        return value is None
    return False


@pytest.mark.parametrize("kind", list(KINDS))
def test_crafted_documents_are_refused(tmp_path: Path, kind: str) -> None:
    write, load = KINDS[kind]
    path = tmp_path / "f.json"
    write(path)
    load(path)
    good = json.loads(path.read_text())
    cases = [
        (f"{where} {str(wrong)[:20]}", with_value(good, where, wrong))
        for where, wrong in variants(good)
        if not where or not is_free(kind, where, wrong)
    ]
    cases += [(f"no {name}", {k: v for k, v in good.items() if k != name}) for name in list(good)[:3]]
    texts = {what: json.dumps(value).encode() for what, value in cases} | HOSTILE_TEXTS
    texts["a newer one"] = json.dumps({**good, "format": 99}).encode()
    wrong = []
    for what, text in texts.items():
        path.write_bytes(text)
        if found := objection(path, lambda: load(path)):
            wrong.append(f"{what}: {found}")
    assert wrong == []
    assert len(texts) > 60


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_disk_that_fails_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write, load = KINDS[kind]
    write(tmp_path / "f.json")
    monkeypatch.setattr("nclbayes.storage.reading.os.fdopen", Failing)
    with pytest.raises(FileError, match=r"Could not read .*f\.json': Input/output error"):
        load(tmp_path / "f.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": []},
        {"tasks": ["a"]},
        {"tasks": []},
        {"losses": [[1.0]]},
        {"seconds": [1.0, 2.0, 3.0]},
        {"evidence": [1.0]},
        {"baseline": [1.0, 2.0, 3.0]},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    a_record(tmp_path / "r.json")
    good = json.loads((tmp_path / "r.json").read_text())
    (tmp_path / "r.json").write_text(json.dumps({**good, **changes}))
    with pytest.raises(FileError, match="is not a record of nclbayes"):
        Record.load(tmp_path / "r.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"set": "nothing"},
        {"method": "nothing"},
        {"scenario": "nothing"},
        {"seed": -1},
        {"prior_scale": 0.0},
        {"prior_scale": -1.0},
        {"size": 0},
        {"tasks": -3},
        {"units": 0},
        {"settings": {"nothing": 1}},
        {"settings": {"steps": -5}},
        {"settings": {"steps": "many"}},
        {"settings": {"lr": [1]}},
    ],
)
def test_a_configuration_of_no_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    a_configuration(tmp_path / "c.json")
    good = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**good, **changes}))
    with pytest.raises(FileError, match="is not a configuration of a run"):
        RunConfig.load(tmp_path / "c.json")
