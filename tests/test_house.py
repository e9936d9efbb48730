"""What must not come back: options that are declared twice, locals passed on, planners that inherit, searches beside the one."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import remat
from remat import options
from remat.cli.commands import main
from remat.integrations.partitioner import Partitioner
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search import proposals

ROOT = Path(remat.__file__).parent
NAMES = [field.name for field in fields(options.PlanOptions)]
#: Entry points, with the options that each takes beside its own arguments.
DOORS: dict[Callable[..., Any], Any] = {
    remat.plan: options.KeywordOptions,
    remat.frontier: options.StepOptions,
    remat.compare: options.StepOptions,
    remat.fit: options.FitOptions,
    remat.partitioner: options.CompileOptions,
    remat.backend: options.CompileOptions,
    Partitioner.__init__: options.PlanOptionsDict,
}


@pytest.mark.parametrize("function", ["locals", "os.dup2"])
def test_no_file_calls(function: str) -> None:
    """No options are passed on as locals, and no file descriptor of the process is redirected."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]
    assert found == []


@pytest.mark.parametrize(
    ("record", "keywords"),
    [
        (options.PlanOptions, options.PlanOptionsDict),
        (options.Training, options.TrainingOptions),
    ],
)
def test_a_typed_dict_has_the_fields_of_its_record(record: Any, keywords: Any) -> None:
    types = {name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()}
    types = {name: re.sub(r"^Required\[(.*)\]$", r"\1", kind) for name, kind in types.items()}
    assert types == {field.name: field.type for field in fields(record)}


def test_a_parsed_request_has_all_options_but_the_isolation_of_its_solver() -> None:
    assert set(NAMES) - {"isolation"} <= {field.name for field in fields(PlanRequest)}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__qualname__)
def test_an_entry_point_declares_no_option_again(door: Callable[..., Any]) -> None:
    """The options that may be given by position stand in the signature, and all others in the record alone."""
    own = inspect.signature(inspect.unwrap(door)).parameters
    taken = DOORS[door].__annotations__
    assert own.keys().isdisjoint(taken)
    assert own.keys() & set(NAMES) <= {"budget", "solver", "cost", "time_limit"}
    assert taken.keys() <= inspect.signature(door).parameters.keys()


@pytest.mark.parametrize(
    "file",
    [
        "api.py",
        "planning/request.py",
        "experiments/grid.py",
        "fitting/fit.py",
        "integrations/partitioner.py",
        "integrations/backend.py",
    ],
)
def test_options_have_types(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    given = [f.args.kwarg for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    kinds = {
        ast.unparse(k.annotation or ast.Constant("")) for k in given if k and k.arg == "options"
    }
    assert kinds
    assert all(kind == "object" or kind.startswith("Unpack[") for kind in kinds), kinds


@pytest.mark.parametrize(
    ("command", "record", "without"),
    [
        ("plan", options.PlanOptions, {"plan", "pipeline", "count_outputs", "isolation"}),
        ("fit", options.Training, {"lower", "device"}),
    ],
)
def test_a_command_takes_help_and_default_from_the_record(
    command: str, record: Any, without: set[str]
) -> None:
    declared = {field.name: field for field in fields(record) if field.name not in without}
    shown = {p.name: p for p in main.commands[command].params if p.name in declared}
    assert shown.keys() == declared.keys()
    words = " ".join(record.__doc__.replace("``", "").split())
    for name, param in shown.items():
        default = declared[name].default
        assert param.required if default is MISSING else param.default == default, name
        assert f"{name}: {param.help}" in words  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    [
        "Unset",
        "refuse_auto_chunk",
        "refuse_offload",
        "refuse_unused_link",
        "_refuse_beside_pipeline",
        "DecisionInfo",
        "PeakPlanner",
        "OffloadPlanner",
        "FusedSearch",
        "PeakFrontier",
        "OrderSearch",
        "PeakOfGraphs",
        "_SetPlanner",
        "EstimatedSearch",
        "Fitting",
        "_search_near",
        "StepPartition",
    ],
)
def test_a_name_that_was_replaced_stays_away(name: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, text in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(rf"\b{name}\b", text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "name",
    [
        "prepared",
        "peak_planner",
        "offload_planner",
        "peak_search",
        "peak_frontier",
        "fused_peak",
        "peak_of_graphs",
        "order_search",
        "estimated",
        "explorer",
    ],
)
def test_a_file_that_was_replaced_stays_away(name: str) -> None:
    assert not list(ROOT.rglob(f"{name}.py"))


def test_each_method_of_a_plan_is_one_statement_that_calls_a_view() -> None:
    (plan,) = (
        node
        for node in ast.parse((ROOT / "planning" / "plan.py").read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    methods = [node for node in plan.body if isinstance(node, ast.FunctionDef)]
    long = [m.name for m in methods if len(m.body) - (ast.get_docstring(m) is not None) != 1]
    assert methods
    assert long == []


def test_nothing_in_planning_inherits_from_planning() -> None:
    trees = [
        ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "planning").rglob("*.py"))
    ]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes}
    heirs = [
        f"{node.name}({ast.unparse(base)})"
        for node in classes
        for base in node.bases
        if ast.unparse(base) in own
    ]
    assert heirs == []


def test_a_planner_has_at_most_ten_methods_and_a_proposer_imports_no_planner() -> None:
    methods = [
        f for f in vars(Planner).values() if inspect.isfunction(f) or isinstance(f, classmethod)
    ]
    assert len(methods) <= 11, "ten methods, and how it is made"
    for path in (ROOT / "planning" / "search").rglob("*.py"):
        assert "planning.planner" not in path.read_text("utf-8"), path.name


def test_only_a_pool_takes_the_least_of_candidates() -> None:
    """`min` with a key that reads a cost or a peak; what is no candidate is listed."""
    others = {"least_found"}  # of searches, to choose among numbers of chunks
    found = []
    for path in sorted((ROOT / "planning").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "min":
                keys = [ast.unparse(k.value) for k in node.keywords if k.arg == "key"]
                read = {a for key in keys for a in re.findall(r"\.(\w+)", key)} - others
                if read & {"cost", "peak_bytes", "saved_bytes"}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def is_number(value: ast.expr | None) -> bool:
    """Whether an expression is a number, or a tuple of numbers."""
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(is_number, value.elts))
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def test_numbers_that_limit_planning_stand_in_effort() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in sorted((ROOT / "planning").rglob("*.py"))
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value)
    ]
    assert len(found) <= 3, found


def test_each_proposer_is_listed() -> None:
    found = [
        f
        for name, f in vars(proposals).items()
        if not name.startswith("_")
        and inspect.isgeneratorfunction(f)
        and f.__module__ == proposals.__name__
    ]
    assert found == [*proposals.PROPOSERS]
    assert all([*inspect.signature(f).parameters] == ["search", "limits", "seeds"] for f in found)
