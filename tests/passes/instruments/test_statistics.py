"""What passes count, by the place of the pass; nothing is counted twice."""

from __future__ import annotations

import pytest

import remat
from remat.passes.instruments import Statistics
from remat.passes.joint.dce import DeadCode
from tests.passes.instruments.passes import Raises, Twice, Wrong, run
from tests.passes.instruments.sample import step


def test_counts_stand_at_the_place_of_the_pass() -> None:
    statistics = Statistics()
    run(step(), "dce,fixpoint(cse,dce)", statistics)
    assert statistics.counts == {
        ("dce",): {"removed": 1},
        ("fixpoint", "cse"): {"merged": 5},
        ("fixpoint", "dce"): {"removed": 0},
        ("fixpoint",): {"rounds": 2},
    }


def test_a_composite_keeps_counts_of_its_own() -> None:
    statistics = Statistics()
    run(step(), [Twice((Wrong(), DeadCode()))], statistics)
    assert statistics.counts[("twice",)] == {"times": 2}
    assert statistics.counts[("twice", "wrong")] == {"swapped": 2}


def test_runs_add_up_and_a_failure_spoils_nothing() -> None:
    statistics = Statistics()
    with pytest.raises(remat.RematError):
        run(step(), [Twice((DeadCode(), Raises()))], statistics)
    run(step(), "dce", statistics)
    assert statistics.counts == {("twice", "dce"): {"removed": 1}, ("dce",): {"removed": 1}}


def test_the_table_leaves_out_what_is_none() -> None:
    statistics = Statistics()
    assert str(statistics) == "nothing was counted"
    run(step(), "fixpoint(cse,dce),dce", statistics)
    assert ("dce",) in statistics.counts
    assert str(statistics).splitlines() == [
        "pass               what  count",
        "------------------------------",
        "fixpoint > cse   merged      5",
        "fixpoint > dce  removed      1",
        "fixpoint         rounds      2",
    ]
