"""The border of the compiled kernel: a call ends in an exception or in a correct answer, whatever it is given.

Malformed calls are drawn: 400, or as many as REMAT_BORDER_CALLS says. `make sanitize` draws 10,000, under
sanitizers.
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from frontier_cases import pareto
from hypothesis import event, given, settings
from hypothesis import strategies as st

import remat
from remat.solvers.kernel import kernel, missing
from remat.solvers.problem import KnapsackProblem
from remat.testing.oracle import brute_force

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
#: None only where all tests here are skipped.
compiled: Any = kernel()

CALLS = int(os.environ.get("REMAT_BORDER_CALLS", "400"))


@pytest.mark.skipif("REMAT_BORDER_CALLS" not in os.environ, reason="for `make sanitize`")
def test_the_kernel_is_the_one_with_sanitizers() -> None:
    assert b"__asan_init" in Path(compiled.__file__).read_bytes()


# ---- references ------------------------------------------------------------------------------------


def knapsack(call: dict[str, Any]) -> KnapsackProblem:
    return KnapsackProblem(call["weights"], call["values"], call["capacity"])


def assert_worth(problem: KnapsackProblem, items: Sequence[int], value: int) -> None:
    assert len(set(items)) == len(items)
    assert problem.weight_of(items) <= problem.capacity
    assert problem.value_of(items) == value


def check_solved(call: dict[str, Any], answer: Any) -> None:
    problem = knapsack(call)
    saved, value, bound, optimal, _ = answer
    assert_worth(problem, saved, value)
    assert value <= brute_force(problem) <= bound
    assert not optimal or value == bound


def check_frontier(call: dict[str, Any], frontier: Any) -> None:
    problem = knapsack(call)
    weights, values = (column.tolist() for column in frontier.points())
    undominated, found = pareto(problem), list(zip(weights, values, strict=True))
    enough = 1 + Fraction(frontier.tolerance) + Fraction(1, 10**12)  # it is computed in doubles
    for weight, value in undominated:
        assert any(w <= weight and v * enough >= value for w, v in found)
    assert found == undominated or frontier.tolerance > 0
    for i, (weight, value) in enumerate(found):
        assert problem.weight_of(frontier.items(i)) == weight
        assert_worth(problem, frontier.items(i), value)


def decisions(call: dict[str, Any]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(bytes, loss, saved) of all decisions of a graph."""
    found: list[tuple[tuple[bool, ...], int, int, tuple[int, ...]]] = [((), 0, 0, ())]
    for v, flag in enumerate(call["flags"]):
        row = slice(call["starts"][v], call["starts"][v + 1])
        reads = list(zip(call["sources"][row], call["flows"][row], strict=True))
        grown = []
        for there, nbytes, loss, saved in found:
            idle = loss + sum(flow for u, flow in reads if there[u])
            if not flag & 4:
                grown.append(((*there, False), nbytes, idle, saved))
            if flag & 1:
                lost = idle + call["save_losses"][v]
                grown.append(((*there, True), nbytes + call["sizes"][v], lost, (*saved, v)))
            if flag & 2 and all(there[u] for u, _ in reads):
                again = loss + call["recompute_losses"][v]
                grown.append(((*there, True), nbytes, again, saved))
        found = grown
    return [(nbytes, loss, saved) for _, nbytes, loss, saved in found]


def check_run(call: dict[str, Any], answer: Any) -> None:
    found, complete, nbytes, loss, saved, _, _ = answer
    legal = [d for d in decisions(call) if d[0] <= call["capacity"] and d[1] <= call["limit"]]
    if found:
        assert (nbytes, loss, tuple(saved)) in legal
    if complete:
        assert found == bool(legal)
        costs = [other - call["price"] * size for size, other, _ in legal]
        assert not found or loss - call["price"] * nbytes == min(costs)


def check_annealed(call: dict[str, Any], answer: Any) -> None:
    assert len(answer) == len(call["turns"])
    for feasible, _, cost, peak, sequence in answer:
        last: dict[int, int] = {}  # the latest run that makes each value
        alive = [0] * len(sequence)
        spans: list[list[int]] = []
        for position, v in enumerate(sequence):
            assert not call["once"][v] or v not in sequence[:position]
            for x in call["reads"][call["starts"][v] : call["starts"][v + 1]]:
                spans[last[x]][1] = position  # a KeyError: nobody has made it
            for x in (x for x, maker in enumerate(call["maker"]) if maker == v):
                last[x] = len(spans)
                spans.append([position, position, call["size"][x]])
        for first, end, nbytes in spans:
            for position in range(first, end + 1):
                alive[position] += nbytes
        used = [a + call["extra"][v] for a, v in zip(alive, sequence, strict=True)]
        assert peak == max(used)
        assert cost == sum(call["cost"][v] for v in sequence)
        assert feasible == (peak <= call["capacity"])
        idle = [v for v, c in enumerate(call["cost"]) if v not in sequence and c]
        assert not idle


# ---- calls -----------------------------------------------------------------------------------------

#: What may go wrong with a number: signs, 53 and 64 bits, types.
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 2**31, 2**32, 2**53, 2**53 + 1, 2**60, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64]
)
FLOATS = st.sampled_from([0.0, -1.0, 0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf])


class Failed(Exception):
    """What an argument raises itself."""


class Index:
    """An entry that fails when it is read."""

    def __index__(self) -> int:
        raise Failed


WRONG = st.one_of(
    NUMBERS,
    FLOATS,
    st.builds(Index),
    st.sampled_from([None, "1", b"\x01", True, 1j, [], (), [1], {1}, {0: 1}, object(), range(3)]),
)
AMOUNTS = st.one_of(st.integers(0, 9), st.integers(0, 2**40))
#: Seven of these, and nine times five of them, still have a sum that the kernel takes.
LARGE = st.one_of(AMOUNTS, st.integers(0, 2**57))
SECONDS = st.sampled_from([0, 0.0, 0.5])


@st.composite
def knapsacks(draw: Any, **more: Any) -> dict[str, Any]:
    n = draw(st.integers(0, 7))
    columns = st.lists(LARGE, min_size=n, max_size=n)
    call = {"weights": draw(columns), "values": draw(columns), "capacity": draw(LARGE)}
    return call | {name: draw(values) for name, values in more.items()}


@st.composite
def rows(draw: Any, n: int, below: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Distinct entries of each of n rows, one row after the other, and where the rows start."""
    starts, entries = [0], list[int]()
    for v in range(n):
        if most := below(v):
            entries += draw(st.lists(st.integers(0, most - 1), max_size=3, unique=True))
        starts.append(len(entries))
    return starts, entries


@st.composite
def graphs(draw: Any, **more: Any) -> dict[str, Any]:
    n = draw(st.integers(0, 5))
    columns = st.lists(LARGE, min_size=n, max_size=n)
    starts, sources = draw(rows(n, lambda v: v))
    flows = draw(st.lists(LARGE, min_size=len(sources), max_size=len(sources)))
    call = {
        **{name: draw(columns) for name in ("sizes", "save_losses", "recompute_losses")},
        "flags": draw(st.lists(st.integers(0, 7), min_size=n, max_size=n)),
        "starts": starts,
        "sources": sources,
        "flows": flows,
        "price": draw(st.integers(0, 9)),
    }
    return call | {name: draw(values) for name, values in more.items()}


TURNS = st.tuples(
    st.integers(0, 99),
    st.integers(0, 2_000),
    *[st.floats(1e-3, 3.0)] * 2,
    *[st.floats(1e-3, 0.5)] * 2,
    st.floats(0, 1),
)


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    n = draw(st.integers(1, 6))
    maker = sorted(draw(st.lists(st.integers(0, n - 1), max_size=8)))
    starts, reads = draw(rows(n, lambda v: sum(m < v for m in maker)))
    columns = st.lists(AMOUNTS, min_size=n, max_size=n)
    once = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    again = [v for v in range(n) if not once[v]]
    return {
        "cost": draw(columns),
        "extra": draw(columns),
        "once": once,
        "starts": starts,
        "reads": reads,
        "maker": maker,
        "size": draw(st.lists(AMOUNTS, min_size=len(maker), max_size=len(maker))),
        "start": [
            *range(n),
            *draw(st.lists(st.sampled_from(again or [0]), max_size=3 if again else 0)),
        ],
        "capacity": draw(AMOUNTS),
        "turns": draw(st.lists(TURNS, max_size=3)),
        "seconds": draw(SECONDS),
    }


GRAPH = ("sizes", "save_losses", "recompute_losses", "flags", "starts", "sources", "flows", "price")
STEP = ("cost", "extra", "once", "starts", "reads", "maker", "size")


def split(make: Any, method: str, names: Sequence[str]) -> Callable[..., Any]:
    """A call of a class with some of the arguments, and of its method with the others."""

    def call(**arguments: Any) -> Any:
        made = make(**{name: arguments[name] for name in names if name in arguments})
        rest = {name: value for name, value in arguments.items() if name not in names}
        return getattr(made, method)(**rest)

    return call


WORK = st.sampled_from([0, 10, 10**6])
MOST = st.sampled_from([0, 1, 4, 16, 10**6])
ENTRIES = {
    "solve": (
        compiled and compiled.solve,
        knapsacks(seconds=SECONDS, work=WORK, states=MOST),
        check_solved,
    ),
    "Frontier": (compiled and compiled.Frontier, knapsacks(most=MOST), check_frontier),
    "Frontier.items": (
        compiled and split(compiled.Frontier, "items", ("weights", "values", "capacity", "most")),
        knapsacks(most=MOST, i=st.integers(0, 3)),
        lambda call, items: assert_worth(knapsack(call), items, knapsack(call).value_of(items)),
    ),
    "GraphCore.run": (
        compiled and split(compiled.GraphCore, "run", GRAPH),
        graphs(capacity=LARGE, limit=LARGE, work=WORK, most=MOST, seconds=SECONDS),
        check_run,
    ),
    "ScheduleGraph.anneal": (
        compiled and split(compiled.ScheduleGraph, "anneal", STEP),
        steps(),
        check_annealed,
    ),
}


def spoil(draw: Any, call: dict[str, Any]) -> dict[str, Any]:
    """One argument, or one entry of a column, becomes another one, goes away, or stands there twice."""
    name = draw(st.sampled_from([*call, "nobody's"]))
    how = draw(st.sampled_from(["entry", "entry", "drop", "more", "turn", "whole"]))
    value = call.get(name)
    if how == "whole" or not isinstance(value, list):
        if draw(st.booleans()) or name not in call:
            return {**call, name: draw(WRONG)}
        return {other: v for other, v in call.items() if other != name}
    value = list(value)
    at = draw(st.integers(0, max(0, len(value) - 1)))
    if how == "more" or not value:
        value.insert(at, draw(st.one_of(NUMBERS, st.integers(0, 7), WRONG)))
    elif how == "drop":
        del value[at]
    elif how == "turn" and isinstance(value[at], tuple) and len(value[at]) == 7:
        k = draw(st.integers(0, len(value[at]) - 1))
        # As many moves as there may be would run for as long as that takes.
        wrong = st.sampled_from([-1, 2**63, 1.5, None]) if k == 1 else WRONG
        value[at] = (*value[at][:k], draw(wrong), *value[at][k + 1 :])
    elif name == "turns":
        value[at] = draw(st.one_of(WRONG, st.just((1, 100, 1.0)), st.just((1,) * 8)))
    else:
        value[at] = draw(st.one_of(NUMBERS, st.integers(-1, 7), WRONG))
    return {**call, name: value}


@st.composite
def spoiled(draw: Any) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(ENTRIES)))
    call = draw(ENTRIES[name][1])
    for _ in range(draw(st.integers(1, 3))):
        call = spoil(draw, call)
    return name, call


def meant(value: Any) -> Any:
    """What an argument says, as far as it is sound; to be asked before the call."""
    if isinstance(value, (list, tuple, range, set)):
        return [meant(v) for v in value]
    return int(value) if isinstance(value, bool) else value


@settings(max_examples=CALLS)
@given(spoiled())
def test_malformed_calls_end_in_exceptions_or_correct_answers(
    drawn: tuple[str, dict[str, Any]],
) -> None:
    name, call = drawn
    function, _, check = ENTRIES[name]
    sound = {argument: meant(value) for argument, value in call.items()}
    try:
        answer = function(**call)
    except (ValueError, OverflowError, TypeError, Failed):
        event("refused")
        return
    check(sound, answer)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_sound_calls_are_answered_correctly(name: str) -> None:
    function, calls, check = ENTRIES[name]

    @settings(max_examples=max(50, CALLS // 20))
    @given(calls)
    def answered(call: dict[str, Any]) -> None:
        # There may be fewer points than the one that is asked for.
        with contextlib.suppress(*[ValueError] * (name == "Frontier.items")):
            check(call, function(**call))

    answered()


@pytest.mark.parametrize("kind", ["strong", "inverse", "subset", "few", "wide"])
def test_sums_up_to_the_limit_are_computed_with_exactly(kind: str) -> None:
    rng = random.Random(kind)
    for n in (3, 20, 60):
        top = 2**59 // n
        values = [rng.randint(1, top) for _ in range(n)]
        weights = {
            "strong": [v + top // 10 for v in values],
            "inverse": [max(1, v - top // 10) for v in values],
            "subset": values,
            "few": [(v % 3 + 1) * (top // 3) for v in values],
            "wide": [rng.choice((1, 2, top)) for _ in values],
        }[kind]
        if kind == "wide":
            values = [rng.choice((1, 3, top)) for _ in values]
        for share in (1, 5, 9):
            capacity = sum(weights) * share // 10
            saved, value, bound, _, _ = compiled.solve(weights, values, capacity, 0, 10**6, 10**5)
            problem = KnapsackProblem(weights, values, capacity)
            assert_worth(problem, saved, value)
            assert problem.relaxed().value <= value <= bound <= problem.relaxed().bound


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((1, 2, 3, 4, 5), (1,), 9), "values has 1 entries; expected 5, one for each weight"),
        (((1,), (-1,), 9), r"values\[0\] is -1; expected an integer from 0 to 2\*\*63 - 1"),
        (((2**62, 2**62), (1, 1), 9), r"weights sum to more than 2\*\*63 - 1; .* coarser unit"),
        (((1, 1), (2**62, 2**62), 9), r"values sum to more than 2\*\*63 - 1; .* coarser unit"),
        (((1,), (1,), -1), "capacity is -1; expected an integer from 0 to"),
    ],
)
def test_all_that_take_a_knapsack_say_what_is_wrong(arguments: Any, says: str) -> None:
    says = f"^{says}"
    wrong = (ValueError, OverflowError, TypeError)
    with pytest.raises(wrong, match=says):
        compiled.Frontier(*arguments, 16)
    with pytest.raises(wrong, match=says.replace("than 2\\*\\*63 - 1", "than 2\\*\\*60")):
        compiled.solve(*arguments, 0.0, 9, 9)


#: Node 0 makes value 0, node 1 reads it and makes value 1, node 2 reads that.
CHAIN: dict[str, Any] = {
    "cost": [0, 2, 0],
    "extra": [0, 0, 0],
    "once": [1, 0, 1],
    "starts": [0, 0, 1, 2],
    "reads": [0, 1],
    "maker": [0, 1],
    "size": [4, 4],
}
ROW = (1, 100, 1.0, 1e-3, 0.1, 0.01, 0.01)


def test_a_run_of_the_last_node_more_than_once_stays_where_it_is() -> None:
    call = {"once": [0, 0, 0], "start": (0, 1, 1, 2, 0, 1, 2, 2), "capacity": 8, "seconds": 0}
    call = {**CHAIN, **call, "turns": [(seed, 5_000, *ROW[2:]) for seed in range(20)]}
    check_annealed(call, ENTRIES["ScheduleGraph.anneal"][0](**call))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"starts": [0, 1, 0, 2]}, r"starts\[2\] is 0; expected an integer from 1 to 2"),
        ({"starts": [1, 1, 1, 2]}, r"starts\[0\] is 1; expected an integer from 0 to 0"),
        ({"starts": [0, 0, 1, 1]}, r"starts\[3\] is 1; expected an integer from 2 to 2"),
        ({"starts": [0, 0, 2]}, "starts has 3 entries; expected 4, one for each node and the end"),
        ({"starts": [0, 0, 2, 2], "reads": [0, 0]}, r"reads\[1\] is 0, which node 1 reads already"),
        ({"reads": [0, 2]}, r"reads\[1\] is 2; expected an integer from 0 to 1"),
        ({"maker": [0, 3]}, r"maker\[1\] is 3; expected an integer from 0 to 2"),
        ({"maker": [0]}, "maker has 1 entries; expected 2, one for each size"),
        ({"once": [0, 2, 0]}, r"once\[1\] is 2; expected an integer from 0 to 1"),
        ({"size": [2**53, 1]}, r"size sum to more than 2\*\*53; .* coarser unit"),
        ({"extra": [2**53, 0, 0]}, r"size and extra sum to more than 2\*\*53; .* coarser unit"),
        ({"start": ()}, "start has 0 entries; expected a run of each node at least"),
        ({"start": (0, 1)}, "start has no run of node 2; expected one of each node that"),
        (
            {"start": (0, 2)},
            r"start\[1\] is node 2, which reads value 1; expected node 1, which makes",
        ),
        (
            {"start": (0, 1, 2, 2)},
            r"start\[3\] is a second run of node 2; expected one, as once says",
        ),
        ({"start": (0, 1, 3)}, r"start\[2\] is 3; expected an integer from 0 to 2"),
    ],
)
def test_a_step_or_start_that_does_not_fit_together_is_refused(
    wrong: dict[str, Any], says: str
) -> None:
    call = {"start": (0, 1, 2), "capacity": 8, "turns": [ROW], "seconds": 0.0}
    with pytest.raises((ValueError, OverflowError), match=f"^{says}"):
        ENTRIES["ScheduleGraph.anneal"][0](**{**CHAIN, **call, **wrong})


@pytest.mark.parametrize("name", ["GraphCore", "ScheduleGraph", "Frontier"])
def test_objects_that_were_never_initialised_are_refused(name: str) -> None:
    kind = getattr(compiled, name)
    empty = kind.__new__(kind)
    calls: dict[str, Callable[[], Any]] = {
        "GraphCore": lambda: empty.run(1, 1, 1, 1, 0.0),
        "ScheduleGraph": lambda: empty.anneal((0,), 1, [], 0.0),
        "Frontier": lambda: empty.points(),
    }
    with pytest.raises(TypeError, match="made by __new__ alone; expected a call of its class"):
        calls[name]()


# ---- threads ---------------------------------------------------------------------------------------

#: A search with so much room left for it, where the stack of a thread takes 256 MiB.
SHORT = """
import resource
from pathlib import Path
from remat.solvers.kernel import kernel

n = {nodes}
graph = kernel().ScheduleGraph({columns})
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {room} * 2**20, -1))
try:
    print(graph.anneal(range(n), 1, {turns}, 0.0))
except MemoryError:
    print("MemoryError")
"""


@pytest.mark.skipif(
    sys.platform != "linux" or "REMAT_BORDER_CALLS" in os.environ,
    reason="limits memory as Linux does, and sanitizers need more",
)
@pytest.mark.parametrize(
    ("nodes", "room", "fits"),
    [
        (200, 2**11, True),
        (200, 384, True),
        (200, 128, True),
        # Two stacks take 512 MiB of these: what is left runs out early or late in the searches.
        *((400_000, room, False) for room in (520, 535, 550)),
    ],
)
def test_a_search_short_of_threads_or_memory_is_answered_or_refused(
    nodes: int, room: int, fits: bool
) -> None:
    columns = "[1] * n, [0] * n, [0] * n, [0, *range(n)], [*range(n - 1)], [*range(n)], [1] * n"
    turns = [(seed, 1_000, *ROW[2:]) for seed in range(4)]
    script = SHORT.format(nodes=nodes, columns=columns, turns=turns, room=room)
    done = subprocess.run(
        ["/bin/sh", "-c", f'ulimit -s {256 * 2**10} && exec "$0" -c "$1"', sys.executable, script],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = "MemoryError"
    if fits:
        graph = compiled.ScheduleGraph(*eval(columns, {"n": nodes}))
        said = str(graph.anneal(range(nodes), 1, turns, 0.0))
    assert done.stdout == f"{said}\n"


# ---- the stub --------------------------------------------------------------------------------------


def signature(function: Any) -> list[str]:
    """Names of the parameters, by the first line of what pybind11 writes about a function."""
    (declared,) = ast.parse(f"def {function.__doc__.splitlines()[0]}: ...").body
    assert isinstance(declared, ast.FunctionDef)
    return parameters(declared)


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the parameters of a function in source text."""
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)]


def built(kind: Any) -> dict[str, Any]:
    """What a module or class has: parameters of each function, members of each class."""
    found: dict[str, Any] = {}
    for name, member in vars(kind).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, type):
            found[name] = built(member)
        else:
            found[name] = "property" if isinstance(member, property) else signature(member)
    return found


def written(body: Sequence[ast.stmt]) -> dict[str, Any]:
    """The same of a stub."""
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = written(node.body)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = "property" if node.decorator_list else parameters(node)
    return found


def test_the_stub_describes_the_module_that_is_built() -> None:
    stub = Path(remat.__file__).parent / "solvers" / "_kernel.pyi"
    assert written(ast.parse(stub.read_text()).body) == built(compiled)
