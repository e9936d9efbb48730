"""A step without remat and with it, in words."""

from __future__ import annotations

from typing import Any

import pytest

from remat.report.before_after import BeforeAfter, more_text

GIB, MS = 2**30, 10**9


def figures(**other: Any) -> BeforeAfter:
    given: dict[str, Any] = {
        "peak_bytes": 2 * GIB,
        "without_peak_bytes": 5 * GIB,
        "step_cost": 100 * MS,
        "recompute_cost": 15 * MS,
        "without_cost": 110 * MS,
        "unit": "ps",
    }
    return BeforeAfter(**given | other)


def test_what_is_added_is_a_share_of_the_step_without_remat() -> None:
    found = figures()
    assert found.more == pytest.approx(5 / 110)
    assert found.recomputing == pytest.approx(15 / 115)
    assert found.line == "2 GiB instead of 5 GiB, 4.5% of the step more"
    assert found.step_text == "115 ms modelled, 4.5% more than the 110 ms without remat"


def test_what_costs_less_says_so() -> None:
    assert figures(recompute_cost=0).line == "2 GiB instead of 5 GiB, 9.1% of the step less"
    assert more_text(-0.0004) == "0.0% more"


def test_nothing_is_said_of_what_is_not_known() -> None:
    old = figures(step_cost=0, without_peak_bytes=0)
    assert (old.more, old.recomputing, old.line, old.step_text) == (None, None, "2 GiB", "")
    pipeline = figures(without_peak_bytes=0)
    assert pipeline.step_text == "115 ms modelled, 13.0% of it recomputing"
    unpriced = figures(step_cost=0)
    assert unpriced.line == "2 GiB instead of 5 GiB"
