"""Imports point down only. The files are read, not imported: a lazy import counts too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import remat

ROOT = Path(remat.__file__).parent
#: What composes the rooms, each on those before it.
COMPOSERS = (
    "planning",
    "mismatch",
    "pipelines",
    "reduction",
    "sweep",
    "together",
    "saved_plans",
    "api",
    "comparison",
    "kept_steps",
    "partitioning",
    "torch_knapsack",
    "compile",
    "checkpointing",
    "testing",
    "cli",
)
#: What the other rooms may import of remat, besides themselves, `errors`, `files` and `lists`.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "torch_compat": set(),
    "lists": set(),
    "solvers": set(),
    "graph": {"solvers", "torch_compat"},
    "passes": {"graph", "solvers", "torch_compat"},
    "sac": {"graph", "plugins", "solvers", "torch_compat"},
    "plugins": {"graph", "passes", "solvers"},
}
ROOMS = set(MAY_IMPORT)
MAY_IMPORT |= {room: ROOMS | set(COMPOSERS[:i]) for i, room in enumerate(COMPOSERS)}
MAY_IMPORT["cli"] -= {"testing"}
#: Libraries that a room does without, wherever in a file the import stands.
NEVER = {room: {"torch"} for room in ("errors", "files", "lists", "solvers")}
#: Libraries that a room imports inside of functions only.
LAZY = {
    "torch_compat": {"torch"},
    "solvers": {"ortools", "scipy", "pulp", "highspy", "numpy"},
    "plugins": {"torch"},
    "testing": {"torch"},
    "cli": {"torch", "transformers"},
}
#: Rooms that a room imports inside of functions only.
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
    """All imports of a file, ``from remat import x`` as ``remat.x``."""

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                base = child.module or ""
                for alias in child.names:
                    name = f"{base}.{alias.name}" if base in ("remat", "torch") else base
                    yield Import(name, child.lineno, lazy, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for inner in child.body:
                    yield from walk(ast.Module(body=[inner], type_ignores=[]), lazy, True)
                for inner in child.orelse:
                    yield from walk(ast.Module(body=[inner], type_ignores=[]), lazy, typing)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, lazy or inside, typing)

    return walk(ast.parse(source), False, False)


def room_of(path: Path) -> str:
    """``graph`` for ``remat/graph/x.py``, ``api`` for ``remat/api.py``."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def faults(room: str, source: str) -> list[str]:
    """What in a file of a room breaks the layering."""
    found = []
    for i in imports(source):
        at = f"line {i.line}: {i.name}"
        library = i.name.partition(".")[0]
        if library in NEVER.get(room, ()):
            found.append(f"{at}: '{room}' never imports {library}")
        if i.typing:  # a type names, it does not run; but a name from above is a dependency still
            if i.room in set(COMPOSERS) - MAY_IMPORT[room] - {room}:
                found.append(f"{at}: '{room}' may not import '{i.room}'")
            continue
        if library in LAZY.get(room, ()) and not i.lazy:
            found.append(f"{at}: '{room}' imports {library} inside functions only")
        if i.room in LAZY_ROOMS.get(room, ()) and not i.lazy:
            found.append(f"{at}: '{room}' imports '{i.room}' inside functions only")
        if i.room is None or i.room in {room, "errors", "files", "lists"}:
            continue
        if i.room not in MAY_IMPORT[room] and not _is_public(room, i):
            found.append(f"{at}: '{room}' may not import '{i.room}'")
    return found


def _is_public(room: str, i: Import) -> bool:
    """``import remat`` and ``remat.__version__``, for rooms that compose."""
    return room in COMPOSERS and (i.name == "remat" or i.name == "remat.__version__")


FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"'{room}' is a new room: say in MAY_IMPORT what it stands on"
    assert faults(room, path.read_text()) == []


def test_the_package_itself_imports_nothing_when_it_is_imported() -> None:
    eager = [
        i
        for i in imports((ROOT / "__init__.py").read_text())
        if not i.typing and i.name.partition(".")[0] not in ("__future__", "importlib", "typing")
    ]
    assert eager == []


@pytest.mark.parametrize(
    ("room", "source", "says"),
    [
        ("solvers", "def f():\n    import torch", "never imports torch"),
        ("solvers", "from remat.graph.costs import Unit", "may not import 'graph'"),
        ("solvers", "from ortools.sat.python import cp_model", "inside functions only"),
        ("solvers", "def f():\n    from remat import graph", "may not import 'graph'"),
        ("graph", "from remat.passes.base import Pass", "may not import 'passes'"),
        ("graph", "def f():\n    import remat.api", "may not import 'api'"),
        ("passes", "from remat.plugins.registry import registry", "may not import 'plugins'"),
        ("passes", "if TYPE_CHECKING:\n    from remat.planning import Plan", "may not import"),
        ("plugins", "from remat.graph.costs import CostModel", "inside functions only"),
        ("api", "from remat.cli import main", "may not import 'cli'"),
    ],
)
def test_a_breach_is_found(room: str, source: str, says: str) -> None:
    assert any(says in fault for fault in faults(room, source))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("solvers", "from remat.errors import SolverError\nimport math"),
        ("graph", "import torch\nfrom remat.solvers.problem import KnapsackProblem"),
        ("plugins", "if TYPE_CHECKING:\n    from remat.graph.costs import CostModel"),
        ("plugins", "def f():\n    from remat.graph.costs import CostModel"),
        ("cli", "from remat import __version__\nfrom remat.cli.models import load"),
    ],
)
def test_what_is_allowed_passes(room: str, source: str) -> None:
    assert faults(room, source) == []
