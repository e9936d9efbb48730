"""The tree of times: what is inside of what, and that the parts make up the whole."""

from __future__ import annotations

import pytest

import remat
from remat.passes.instruments import Timing
from remat.passes.instruments.timing import resident_bytes
from tests.passes.instruments.passes import Looks, Raises, Returns, run
from tests.passes.instruments.sample import WHOLE, step


def tree(timing: Timing) -> list[tuple[int, str, int]]:
    return [(depth, span.name, span.runs) for depth, span in timing.root.walk()]


def test_passes_and_analyses_nest() -> None:
    timing = Timing()
    run(step(), [Looks(), Looks()], timing)
    assert tree(timing) == [
        (0, "pipeline", 1),
        (1, "looks", 2),
        (2, "(distances)", 1),
        (3, "(positions)", 1),
        (3, "(classification)", 1),
    ]


def test_composites_hold_their_passes_and_runs_add_up() -> None:
    timing = Timing()
    for _ in range(2):
        run(step(), "fixpoint(dce,cse),fixpoint(limit=1,dce)", timing)
    assert tree(timing) == [
        (0, "pipeline", 2),
        (1, "fixpoint", 4),
        (2, "dce", 6),
        (2, "cse", 4),
    ]


def test_the_parts_make_up_the_whole() -> None:
    timing = Timing()
    run(step(), WHOLE, timing)
    spans = [span for _, span in timing.root.walk()]
    assert sum(span.own_s for span in spans) == pytest.approx(timing.root.total_s)
    assert all(span.total_s >= sum(s.total_s for s in span.inside.values()) for span in spans)


def test_a_failure_leaves_a_whole_tree() -> None:
    timing = Timing()
    with pytest.raises(remat.RematError):
        run(step(), [Looks(), Returns()], timing)
    with pytest.raises(remat.RematError):
        run(step(), [Raises()], timing)
    assert [name for _, name, _ in tree(timing)][-2:] == ["returns", "raises"]
    run(step(), [Looks()], timing)
    assert tree(timing)[0] == (0, "pipeline", 3)


def test_nothing_is_watched_once_it_is_over() -> None:
    timing = Timing()
    run(step(), "dce", timing)
    before = tree(timing)
    run(step(), [Looks()])
    assert tree(timing) == before


def test_the_table_names_units() -> None:
    timing = Timing()
    assert "0.0%" in str(timing), "nothing has run"
    run(step(), "fixpoint(dce,cse)", timing)
    head, rule, *rows = str(timing).splitlines()
    assert head.split() == ["own", "s", "total", "s", "share", "memory", "MiB", "runs"]
    assert set(rule) == {"-"}
    assert [row[:10].rstrip() for row in rows] == ["pipeline", "  fixpoint", "    dce", "    cse"]
    assert "100.0%" in rows[0]
    assert [row["name"] for row in timing.to_dict()] == ["pipeline", "fixpoint", "dce", "cse"]


def test_memory_is_that_of_this_process() -> None:
    before = resident_bytes()
    # Large enough that the allocator asks the system for it instead of reusing freed memory.
    held = bytearray(b"x" * 2**26)
    assert resident_bytes() - before >= 2**25
    assert len(held) == 2**26
