"""Imports point down, and go round in no circle. The files are read, not imported: every import counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import remat

ROOT = Path(remat.__file__).parent
#: The rooms, each on those before it.
IN_ORDER = """
    version lazy errors files arguments units torch_compat torch_older solvers graph running report passes plugins
    options record sac checkpointing planning experiments fitting reduction api integrations testing cli __main__
    """
ROOMS = tuple(IN_ORDER.split())
#: Rooms within rooms, likewise; files beside them hand on names, or list what is in them.
INNER = {
    "passes": ("packing", "core", "decide", "joint", "split", "hooks", "ranks", "instruments"),
    "sac": ("run", "policies", "estimation", "solve", "api"),
}  # fmt: skip
#: Rooms that do without some of those below.
WITHOUT = {
    "solvers": {"torch_compat", "torch_older", "units"},
    "graph": {"passes"},
    "passes": {"report"},
    "cli": {"testing"},
}
#: Libraries that a room does without, wherever in a file the import stands.
NEVER = {room: {"torch"} for room in (*ROOMS[:6], "solvers")}
#: Libraries that a room imports inside of functions only.
LAZY = {
    "torch_compat": {"torch"},
    "torch_older": {"torch"},
    "solvers": {"ortools", "scipy", "pulp", "highspy", "numpy"},
    "plugins": {"torch"},
    "testing": {"torch"},
    "cli": {"torch", "transformers"},
}
#: Rooms that a room imports inside of functions only: they bring torch with them.
LAZY_ROOMS = {"plugins": {"graph", "passes"}}


@dataclass(frozen=True)
class Import:
    """One import: the dotted name, where it stands, and whether it runs with the module."""

    name: str
    line: int
    lazy: bool
    typing: bool

    @property
    def room(self) -> str | None:
        """The room of remat it reaches into; ``remat`` for a public name that stands for one."""
        parts = self.name.split(".")
        return None if parts[0] != "remat" else (parts[1] if len(parts) > 1 else "remat")


def imports(source: str) -> Iterator[Import]:
    """All imports of a file, each name of ``from x import y`` as ``x.y``."""

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                for alias in child.names:
                    yield Import(f"{child.module}.{alias.name}", child.lineno, lazy, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for inner in child.body:
                    yield from walk(ast.Module(body=[inner], type_ignores=[]), lazy, True)
                for inner in child.orelse:
                    yield from walk(ast.Module(body=[inner], type_ignores=[]), lazy, typing)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, lazy or inside, typing)

    return walk(ast.parse(source), False, False)


def faults(module: str, source: str) -> list[str]:
    """What in a file, known by its module, breaks the layering."""
    found = []
    room, *inner = module.split(".")[1:]
    for i in imports(source):
        at = f"line {i.line}: {i.name}"
        library = i.name.partition(".")[0]
        if library in NEVER.get(room, ()):
            found.append(f"{at}: '{room}' never imports {library}")
        if library in LAZY.get(room, ()) and not (i.lazy or i.typing):
            found.append(f"{at}: '{room}' imports {library} inside functions only")
        if i.room in LAZY_ROOMS.get(room, ()) and not (i.lazy or i.typing):
            found.append(f"{at}: '{room}' imports '{i.room}' inside functions only")
        if i.room is None:
            continue
        if i.room not in ROOMS or ROOMS.index(i.room) > ROOMS.index(room):
            found.append(f"{at}: '{room}' may not import '{i.room}'")
        if i.room in WITHOUT.get(room, ()):
            found.append(f"{at}: '{room}' does without '{i.room}'")
        order = INNER.get(room)
        parts = i.name.split(".")
        if order and i.room == room and len(parts) > 3 and inner and inner[0] in order:
            below = order[: order.index(inner[0]) + 1]
            if parts[2] not in below:
                found.append(f"{at}: '{room}.{inner[0]}' may not import '{room}.{parts[2]}'")
    return found


def modules() -> dict[str, Path]:
    """Every module of remat with its file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_imports_point_down() -> None:
    broken = {
        name: found
        for name, path in modules().items()
        if name != "remat" and (found := faults(name, path.read_text()))
    }
    assert broken == {}


def test_imports_go_round_in_no_circle() -> None:
    """Those inside of functions count too, and those for type checkers."""
    known = modules()
    graph = {
        name: {
            target
            for i in imports(path.read_text())
            for target in [i.name if i.name in known else i.name.rpartition(".")[0]]
            if target in known and target != name
        }
        for name, path in known.items()
        if name != "remat"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("solvers.x", "def f():\n    import torch", "never imports torch"),
        ("solvers.x", "from remat.graph.costs import Unit", "may not import 'graph'"),
        ("solvers.x", "from ortools.sat.python import cp_model", "inside functions only"),
        ("graph.x", "from remat.passes.core.base import Pass", "may not import 'passes'"),
        ("graph.x", "def f():\n    import remat.api", "may not import 'api'"),
        ("passes.core.x", "from remat.passes.split.partition import Partition", "may not import"),
        ("passes.core.x", "if TYPE_CHECKING:\n    from remat.planning.plan import Plan", "may not"),
        ("report.x", "if TYPE_CHECKING:\n    from remat.record import PlanRecord", "may not"),
        ("plugins.x", "from remat.graph.costs import CostModel", "inside functions only"),
        ("sac.run.x", "from remat.sac.solve.plan import SACPlan", "may not import 'sac.solve'"),
    ],
)
def test_a_breach_is_found(module: str, source: str, says: str) -> None:
    assert any(says in fault for fault in faults(f"remat.{module}", source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("solvers.x", "from remat.errors import SolverError\nimport math"),
        ("graph.x", "import torch\nfrom remat.solvers.problem import KnapsackProblem"),
        ("plugins.x", "if TYPE_CHECKING:\n    from remat.graph.costs import CostModel"),
        ("plugins.x", "def f():\n    from remat.graph.costs import CostModel"),
        ("cli.x", "from remat.version import __version__\nfrom remat.cli.models import load"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert faults(f"remat.{module}", source) == []


def test_public_paths_are_the_modules_that_they_stand_for() -> None:
    import remat.checkpointing
    import remat.passes.cse
    import remat.sac
    from remat.passes.joint import cse

    assert remat.checkpointing is remat.sac
    assert remat.passes.cse.merge is cse.merge
