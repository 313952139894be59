"""Files of earlier formats are still read, by what their header says and their blocks demand."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
import torch

import nclbayes as ncl
from nclbayes.methods import CoresetLearner
from tests.storage.small import OLD, digest, model, task

MEANS = {
    "laplace": [-0.40916526317596436, 0.151505246758461, -0.16114085912704468, -0.30109360814094543],
    "ewc": [-0.005292980931699276, 0.37580549716949463, -0.5819781422615051, -0.5168110728263855],
    "coreset": [-0.27636465430259705, 0.2060815840959549, -0.29100072383880615, -0.34533241391181946],
}


@pytest.mark.parametrize("name", list(MEANS))
def test_a_file_of_the_first_format_loads_and_learns_on(name: str) -> None:
    kind = CoresetLearner if name == "coreset" else ncl.OnlinePosterior
    loaded = kind.load(OLD / f"{name}-1.ncl", model())
    assert loaded.tasks == ("task 0", "task 1")
    assert loaded.mean()["linear.weight"].flatten().tolist() == MEANS[name]
    assert type(loaded.engine).__name__ == {"ewc": "EWC"}.get(name, "LaplaceNCL")
    if isinstance(loaded, CoresetLearner):
        assert [len(kept.train[0]) for kept in loaded.kept] == [2, 2]
        assert loaded.refined().engine.steps == 4
    loaded.update(task(), progress=False)
    assert torch.isfinite(loaded.predict(torch.zeros(3, 2)).probs).all()


def test_a_file_of_the_second_format_loads_and_is_written_anew_with_its_roots(tmp_path: Path) -> None:
    """Whether its factors would give the same roots, it does not say."""
    loaded = ncl.OnlinePosterior.load(OLD / "laplace-2.ncl", model())
    assert loaded.tasks == ("task 0", "task 1")
    expected = [-0.34454086422920227, 0.21257835626602173, -0.2323257476091385, -0.35732126235961914]
    assert loaded.mean()["linear.weight"].flatten().tolist() == expected
    loaded.save(tmp_path / "p")
    assert digest(ncl.OnlinePosterior.load(tmp_path / "p", model())) == digest(loaded)
    loaded.update(task(), progress=False)
    loaded.save(tmp_path / "p")
    assert digest(ncl.OnlinePosterior.load(tmp_path / "p", model())) == digest(loaded)


def test_an_evidence_that_is_no_number_counts_as_none(tmp_path: Path) -> None:
    """Updates left such ones then; files of format 2 hold none."""
    content = (OLD / "laplace-1.ncl").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    about = json.loads(header["__metadata__"]["nclbayes"])
    about["settings"]["log_evidence"] = float("-inf")
    text = json.dumps(about)
    header["__metadata__"] |= {"nclbayes": text, "seal": str(zlib.crc32(text.encode()))}
    made = json.dumps(header).encode()
    made += b" " * (-len(made) % 8)
    (tmp_path / "p").write_bytes(struct.pack("<Q", len(made)) + made + content[8 + length :])
    loaded = ncl.OnlinePosterior.load(tmp_path / "p", model())
    assert loaded.log_evidence is None
    assert loaded.mean()["linear.weight"].flatten().tolist() == MEANS["laplace"]
