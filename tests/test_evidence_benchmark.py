"""The benchmark of the evidence against held-out examples, in short."""

from __future__ import annotations

import pytest

import nclbayes as ncl
from tests.benchmarks import evidence
from tests.benchmarks.evidence import Judged, compared, judged, mean_of


def test_the_table_tells_how_both_order_settings() -> None:
    found = {
        1.0: Judged(-3.0, 0.5, -0.9, -0.1),
        10.0: Judged(-1.0, 0.6, -1.5, -0.2),
        100.0: Judged(-2.0, 0.9, -1.0, -0.3),
    }
    lines = compared("made up", "prior scale", found).splitlines()
    assert lines[4].split() == ["1", "-3.000", "0.500", "-0.900", "-0.100"]
    # By hand: 1 - 6 sum d^2 / (3 * 8), of the ranks 1, 3, 2 against 1, 2, 3, then 3, 1, 2, then 3, 2, 1.
    assert lines[-1].split()[-3:] == ["0.50", "-1.00", "-0.50"]


def test_a_setting_is_judged_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evidence.TOLD, "steps", 12)
    one, two = (judged("friedman/10", seed, 3.0) for seed in (0, 1))
    reports = []
    update = ncl.OnlinePosterior.update
    monkeypatch.setattr(
        ncl.OnlinePosterior, "update", lambda *args, **rest: reports.append(update(*args, **rest)) or reports[-1]
    )
    again = judged("friedman/10", 0, 3.0)
    assert again == one != two
    assert len(reports) == 5
    assert one.evidence * 1600 == pytest.approx(sum(report.log_evidence for report in reports))
    assert mean_of([one, two]).accuracy == pytest.approx((one.accuracy + two.accuracy) / 2)
