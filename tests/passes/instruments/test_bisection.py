"""Leaving passes out, and finding the one to blame."""

from __future__ import annotations

import pytest

from remat.errors import ProblemError
from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline import Pipeline
from remat.passes.core.state import PassResult
from remat.passes.instruments import OptBisect, VerifyEach, bisect
from remat.passes.joint.dce import DeadCode
from remat.passes.split.partition import Partition
from remat.planning.pipelines import PassManager as Registered
from tests.graphs import calls
from tests.passes.instruments.passes import Looks, Raises, Wrong, run
from tests.passes.instruments.sample import WHOLE, step


def test_only_the_first_passes_run() -> None:
    written: list[str] = []
    limited = OptBisect(3, write=written.append)
    result = run(step(), "fixpoint(dce,cse),fixpoint(limit=1,dce,raise-getitems)", limited)
    assert written == limited.lines
    assert len(limited.paths) == 6
    assert written == [
        "BISECT: running pass (1) fixpoint > dce",
        "BISECT: running pass (2) fixpoint > cse",
        "BISECT: running pass (3) fixpoint > dce",
        "BISECT: NOT running pass (4) fixpoint > cse",
        "BISECT: NOT running pass (5) fixpoint > dce",
        "BISECT: NOT running pass (6) fixpoint > raise-getitems",
    ]
    assert "sin_1" not in calls(result.graph_module)


@pytest.mark.parametrize("limit", [0, 2, 4])
def test_a_pipeline_is_right_wherever_it_is_cut(limit: int) -> None:
    """Passes without which it would be wrong run always, so every prefix passes the checks."""
    limited = OptBisect(limit)
    result = run(step(), WHOLE, limited, VerifyEach(numbers=True))
    assert result.forward is not None
    assert not any("partition" in line or "functionalize" in line for line in limited.lines)


def two_cosines(result: PassResult) -> bool:
    return sum(str(n.target) == "aten.sin.default" for n in result.joint.graph.nodes) < 2


@pytest.mark.parametrize("where", [0, 2, 4])
def test_the_first_bad_pass_is_found(where: int) -> None:
    passes = [DeadCode(), Looks(), DeadCode(), Looks()]
    passes.insert(where, Wrong())
    found = bisect(Pipeline((Fixpoint(tuple(passes), 1),)), step(), two_cosines)
    assert found is not None
    assert (found.number, found.path) == (where + 1, ("fixpoint", "wrong"))


def test_a_pass_that_raises_is_bad() -> None:
    graph, before = step(), step().fingerprint
    passes = (DeadCode(), Looks(), Raises(), DeadCode())
    found = bisect(Pipeline(passes), graph, lambda _: False)
    assert found is not None
    assert (found.number, found.path) == (3, ("raises",))
    assert graph.fingerprint == before


def test_a_check_can_be_what_is_bad() -> None:
    passes = (DeadCode(), Wrong(), Looks())
    found = bisect(
        Pipeline(passes), step(), lambda _: False, instruments=[VerifyEach(numbers=True)]
    )
    assert found is not None
    assert found.path == ("wrong",)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert bisect(Registered.parse("dce,cse"), step(), two_cosines) is not None, "cse merges them"
    assert bisect(Registered.parse("dce"), step(), two_cosines) is None


def test_what_cannot_be_left_out_is_suspected_then() -> None:
    with pytest.raises(ProblemError, match="every pass is left out that can be; suspect partition"):
        bisect(Pipeline((DeadCode(), Partition())), step(), lambda _: True)
