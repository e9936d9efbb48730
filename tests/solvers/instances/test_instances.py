"""Instances as files: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from remat.errors import ProblemError, RematError
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.instances import file_format as instance_format
from remat.solvers.instances.instance import Instance, load_instance, save_instance
from remat.solvers.problem import KnapsackProblem
from remat.solvers.schedule.problem import ScheduleProblem
from remat.testing.families import family
from remat.testing.graphs import random_graph
from remat.testing.steps import random_schedule_problem


def graph() -> Instance:
    problem = GraphProblem(
        names=("x", "mm", "relu:state"),
        inputs=((), (0,), (0, 1)),
        cost=(0, 700, 5),
        size=(0, 4096, 16),
        savable=(True, True, False),
        recomputable=(False, True, True),
        in_forward=(True, True, True),
        needed=(0, 2),
        unit="ps",
    )
    return Instance(
        name="tiny",
        problem=problem,
        full_bytes=4112,
        least_bytes=0,
        cost="roofline:h100",
        unit="ps",
        source="three nodes × 1",
    )


def knapsack() -> Instance:
    return Instance(
        name="items",
        problem=KnapsackProblem(weights=(3, 2**40), values=(5, 7), capacity=9),
        cost="flops",
        unit="FLOP",
    )


def step() -> Instance:
    problem = ScheduleProblem(
        names=("x", "f", "mask", "g"),
        inputs=((), (0,), (), (0, 2)),
        cost=(0, 2, 0, 3),
        size=(10, 4, 1, 5),
        capacity=30,
        part_of=(-1, -1, 1, -1),
        extra=(0, 7, 0, 0),
        once=(3,),
        at_start=(0,),
        to_end=(0, 3),
        resident=2,
        unit="ps",
    )
    return Instance(name="step", problem=problem, unit="ps")


GRAPH_TEXT = """\
{"remat_instance":1,
"kind":"graph",
"name":"tiny",
"source":"three nodes × 1",
"cost":"roofline:h100",
"unit":"ps",
"full_bytes":4112,
"least_bytes":0,
"problem":{"names":["x","mm","relu:state"],
"inputs":[[],[0],[0,1]],
"cost":[0,700,5],
"size":[0,4096,16],
"savable":"110",
"recomputable":"011",
"in_forward":"111",
"needed":[0,2],
"capacity":null}}
"""
KNAPSACK_TEXT = """\
{"remat_instance":1,
"kind":"knapsack",
"name":"items",
"source":"",
"cost":"flops",
"unit":"FLOP",
"full_bytes":null,
"least_bytes":null,
"problem":{"weights":[3,1099511627776],
"values":[5,7],
"capacity":9}}
"""
STEP_TEXT = step().to_json()


@pytest.mark.parametrize(("made", "text"), [(graph(), GRAPH_TEXT), (knapsack(), KNAPSACK_TEXT)])
def test_version_1_is_written_and_read_like_this(made: Instance, text: str, tmp_path: Path) -> None:
    assert made.to_json() == text
    assert Instance.from_json(text) == made
    assert load_instance(text) == made
    save_instance(tmp_path / "a.json", made)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == text
    assert load_instance(str(tmp_path / "a.json")) == made
    assert remat.load_instance(tmp_path / "a.json") == made


def drawn(seed: int) -> Iterator[Instance]:
    """An instance of each kind."""
    n = seed % 12
    graph = random_graph(seed, nodes=4 + n)
    yield Instance(name="g", problem=graph, full_bytes=9, least_bytes=seed % 9, unit=graph.unit)
    step = random_schedule_problem(seed, nodes=4 + n).within(2**62 + seed)
    yield Instance(name="s", problem=step, unit=step.unit)
    items = family("circle", items=n, span=2**40, share=seed, seed=seed)
    yield Instance(name="k", problem=items, source="£ × 🔥 ="[: seed % 8], unit="ms")


@pytest.mark.parametrize("seed", range(12))
def test_every_instance_comes_back_as_it_was(seed: int) -> None:
    for made in drawn(seed):
        text = made.to_json()
        assert Instance.from_json(text) == made
        assert Instance.from_json(text).to_json() == text


@pytest.mark.parametrize("text", [GRAPH_TEXT, KNAPSACK_TEXT])
def test_a_text_cut_off_anywhere_is_refused(text: str) -> None:
    for end in range(len(text) - 1):  # the last character is the end of the line
        with pytest.raises(ProblemError):
            Instance.from_json(text[:end])


def refused_in_one_line_or_read(text: str) -> None:
    said = "an instance"
    try:
        read = Instance.from_json(text)
        assert Instance.from_json(read.to_json()) == read
    except ProblemError as error:
        said = str(error)
    assert len(said.splitlines()) == 1
    assert len(said) < 500


@given(st.integers(0, 2**32), st.sampled_from([GRAPH_TEXT, KNAPSACK_TEXT]))
def test_a_text_changed_anywhere_is_refused_or_means_something_else(seed: int, text: str) -> None:
    draw = random.Random(seed)
    changed = list(text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed))
        changed[at] = draw.choice(['"', "[", "]", "{", "}", ",", "-", "9", "e", ".", "\\", ""])
    refused_in_one_line_or_read("".join(changed))


def test_any_json_is_refused_or_an_instance() -> None:
    @settings(max_examples=40)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["names", "problem", "kind"]), inner)
            ),
        ),
        st.sampled_from(list(json.loads(GRAPH_TEXT)) + list(json.loads(GRAPH_TEXT)["problem"])),
    )
    def check(value: Any, key: str) -> None:
        data = json.loads(GRAPH_TEXT)
        (data if key in data else data["problem"])[key] = value
        refused_in_one_line_or_read(json.dumps(data))

    check()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"remat_instance":1', '"remat_instance":2', "reads version 1: update"),
        ('"remat_instance":1', '"remat_instance":0', "version 0; this remat reads version 1"),
        ('"remat_instance":1', '"remat_instance":true', "expected a JSON object with the key"),
        ('"kind":"graph"', '"kind":"tree"', "expected 'graph', 'knapsack' or 'schedule'"),
        ('"kind":"graph"', '"kind":["graph"]', "kind is a list of 1; expected 'graph'"),
        ('"kind":"graph"', '"kind":"knapsack"', "problem has no key 'weights'"),
        ('"kind":"graph",', '"kind":"graph","colour":1,', "unknown key 'colour'"),
        ('"kind":"graph",\n', "", "the file has no key 'kind'"),
        ('"needed":[0,2]', '"needed":[0,2],"extra":[]', "problem has the unknown key 'extra'"),
        ('"needed":[0,2],\n', "", "problem has no key 'needed'"),
        ('"name":"tiny"', '"name":"tiny","name":"other"', "key 'name' stands there twice"),
        ('"name":"tiny"', '"name":""', "name is empty"),
        ('"name":"tiny"', '"name":null', "name is None; expected printable text"),
        ('"name":"tiny"', '"name":"\\u001b[2J"', "expected printable text"),
        ('"unit":"ps"', '"unit":7', "unit is 7; expected printable text"),
        ('"full_bytes":4112', '"full_bytes":null', "full_bytes is None; expected an integer"),
        ('"least_bytes":0', '"least_bytes":-1', "least_bytes is -1; expected an integer from 0"),
        ('"least_bytes":0', '"least_bytes":5000', "expected no less than least_bytes, 5000"),
        ('["x","mm","relu:state"]', '["x","mm",3]', "names[2] is 3; expected text"),
        ('["x","mm","relu:state"]', '["x","m\\nm","z"]', "names[1] is 'm\\nm'; expected printable"),
        ('["x","mm","relu:state"]', '"xyz"', "names is 'xyz'; expected a list"),
        ("[0,700,5]", "[0,NaN,5]", "NaN stands where only integers may"),
        ("[0,700,5]", "[0,1e999,5]", "cost[1] ('mm') is inf; expected an integer"),
        ("[0,700,5]", f"[0,{'9' * 5000},5]", "a number is too long"),
        ('"savable":"110"', '"savable":"11x"', "savable is '11x'; expected text of digits"),
        ('"savable":"110"', '"savable":[1,1,0]', "savable is a list of 3; expected text of digits"),
        ('"capacity":9', '"capacity":null', "capacity is None; expected an integer"),
        ('"full_bytes":null', '"full_bytes":1', "full_bytes is 1; a knapsack has none"),
        ('"once":[3]', '"once":"3"', "once is '3'; expected a list"),
        ('"to_end":[0,3],\n', "", "problem has no key 'to_end'"),
    ],
)
def test_what_cannot_be_meant_is_named(old: str, new: str, says: str) -> None:
    text = next(text for text in (GRAPH_TEXT, KNAPSACK_TEXT, STEP_TEXT) if old in text)
    assert text.count(old) == 1
    with pytest.raises(ProblemError) as caught:
        Instance.from_json(text.replace(old, new))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON, or it is cut off"),
        (b"{}", "expected a JSON object with the key 'remat_instance'"),
        (b'{"remat_instance":1}{"remat_instance":1}', "no JSON, or it is cut off"),
        (b'{"remat_instance":1,"problem":' + b"[" * 100_000, "nested too deeply"),
        (b"[1]", "expected a JSON object, got a list of 1"),
        (b"\x80\x02}q\x00.", "no text in UTF-8: byte 0"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_other_texts_and_files_are_no_instances(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ProblemError, match=rf"f' cannot be read: .*{says}"):
        load_instance(tmp_path / "f")
    if content.startswith(b"{"):
        with pytest.raises(ProblemError, match=says):
            load_instance(content.decode())


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="No such file"):
        load_instance(tmp_path / "none.json")
    with pytest.raises(ProblemError, match="directory"):
        load_instance(tmp_path)
    with pytest.raises(ProblemError, match="null byte"):
        load_instance("a\0b")


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_instance(tmp_path / "a.json", graph())
    monkeypatch.setattr(instance_format, "MAX_BYTES", 100)
    with pytest.raises(ProblemError, match=r"larger than the 100 bytes that are read"):
        load_instance(tmp_path / "a.json")
    with pytest.raises(ProblemError, match=r"would take \d+ bytes; at most 100 are read"):
        save_instance(tmp_path / "b.json", graph())
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"problem": 7}, "problem is a int; expected a GraphProblem"),
        ({"name": "two\nlines"}, "name is 'two"),
        ({"source": "x" * 1001}, "source is 'xxxxxxxx"),
        ({"unit": "op"}, "unit is 'op', but the problem's costs are in 'ps'"),
        ({"full_bytes": True}, "full_bytes is True"),
        ({"least_bytes": None}, "least_bytes is None"),
    ],
)
def test_an_instance_checks_what_it_is_given(changes: dict[str, Any], says: str) -> None:
    values = {key: getattr(graph(), key) for key in (*instance_format.HEAD, "problem")}
    with pytest.raises(ProblemError) as caught:
        Instance(**{**values, **changes})
    assert says in str(caught.value)


def test_what_is_no_instance_or_no_file_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RematError, match="cannot be written"):
        save_instance(tmp_path, graph())
    with pytest.raises(ProblemError, match="instance is a PosixPath; expected an Instance"):
        remat.save_instance(3, tmp_path / "out.json")  # type: ignore[arg-type]


NODES = [{"id": 7, "duration": 3, "out_cost": 8}, {"id": 5, "duration": 1, "out_cost": 4}]


def test_published_graphs_are_read_in_their_order() -> None:
    layered = {"graph": {"order": [5, 7]}, "nodes": NODES, "links": [{"0": 5, "1": 7}]}
    problem = load_instance(json.dumps(layered)).problem
    assert isinstance(problem, ScheduleProblem)
    assert (problem.names, problem.inputs) == (("5", "7"), ((), (0,)))
    assert (problem.cost, problem.size) == ((1, 3), (4, 8))
    checkmate = {
        "graph": {"name": "net"},
        "nodes": [
            {"name": "relu", "cost_cpu": 2, "cost_ram": 6, "id": 0},
            {"name": "conv", "cost_cpu": 9, "cost_ram": 5, "id": 1},
        ],
        "links": [{"source": 1, "target": 0}],
    }
    instance = load_instance(json.dumps(checkmate))
    assert (instance.name, instance.problem.names) == ("net", ("conv", "relu"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"links": [{"0": 5, "1": 7}, {"0": 7, "1": 5}], "graph": {}}, "the graph has a cycle"),
        ({"links": [{"0": 5, "1": 8}]}, r"links\[0\] is .*expected the ids of two nodes"),
        ({"graph": {"order": 5}}, "graph.order must be a list of node ids"),
        ({"directed": False}, "the graph is undirected"),
        (
            {"nodes": [{**NODES[0], "name": "a\n\x1b[31m"}, NODES[1]]},
            r"names\[\d\] is .*expected printable text",
        ),
        ({"graph": {"order": [5]}}, "graph.order must name every node once"),
        ({"graph": {"order": [5, 6]}}, "graph.order names '6', which is no node"),
        ({"nodes": [{"id": 5}, {"id": 7}]}, "node '5' has none of cost_cpu, duration, cost"),
        ({"nodes": [{"id": 5}, {"id": 5}]}, "nodes must be objects with different ids"),
        (
            {"nodes": [{"id": 5, "duration": -1, "out_cost": 3}, NODES[0]]},
            r"cost\[0\] \('5'\) is -1",
        ),
    ],
)
def test_published_graphs_that_cannot_be_meant(changes: dict[str, Any], says: str) -> None:
    good = {"graph": {}, "nodes": NODES, "links": [{"0": 5, "1": 7}]}
    with pytest.raises(ProblemError, match=says):
        load_instance(json.dumps({**good, **changes}))
