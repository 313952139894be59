"""Names are shown as they are, and what cannot be seen is spelled out."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("matplotlib")

from nclbayes import Record, Score
from nclbayes.analysis import plots
from nclbayes.analysis.names import plain
from tests.analysis.hostile import names


def test_what_cannot_be_seen_is_spelled_out() -> None:
    assert plain("split digits: 0 and 1, 名前, 100\N{NO-BREAK SPACE}%") == "split digits: 0 and 1, 名前, 100\u00a0%"
    assert plain("\x1b[31m\x00\x7f\u202e\ud800") == r"\x1b[31m\x00\x7f\u202e\ud800"
    assert plain("one\ntwo\t\x07", keep="\n\t") == "one\ntwo\t\\x07"


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:Matplotlib currently does not support")
@pytest.mark.parametrize("name", names("http://localhost"), ids=lambda name: ascii(name)[:20])
def test_a_picture_shows_any_name(name: str) -> None:
    record = Record([name, "plain"])
    record.add([Score(0.9, 0.3, 0.1, 10), Score(0.5, 0.7, math.nan, 10)], losses=[1.0, 0.5])
    for figure in (plots.accuracy_matrix(record), plots.loss_curves(record), plots.compare_methods({name: [record]})):
        shown = [text.get_text() for text in figure.findobj(match=lambda a: hasattr(a, "get_parse_math"))]
        assert any(text.removesuffix("…") in plain(" ".join(name.split())) for text in shown if len(text) > 4)
        for text in figure.findobj(match=lambda a: hasattr(a, "get_parse_math")):
            assert not text.get_parse_math() or "$" not in text.get_text()
