"""Private names of PyTorch: all in one module, looked up when first needed."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import remat
from remat import torch_compat
from remat.errors import RematError, TorchVersionError
from remat.torch_compat import TorchVersionWarning

ROOT = Path(remat.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if p.name not in ("torch_compat.py", "torch_older.py"))
#: Private attributes that Python itself gives to what it makes.
PYTHONS = {"_fields", "_asdict", "_replace"}
_DOTTED = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")


def _is_private(name: str) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def _own_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a file defines itself: functions, classes, attributes, fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def private_uses(source: str, own: set[str]) -> list[str]:
    """Where a file reaches for something private that is neither its package's nor Python's.

    Operators (``torch.ops.aten._softmax``) are names in graphs, not parts of PyTorch.
    """
    tree, found = ast.parse(source), []
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("torch")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            if not ast.unparse(node).startswith(("self.", "cls.", "torch.ops.")):
                names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if id(node) not in docs and _DOTTED.fullmatch(node.value) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            named = node.args[1]
            if isinstance(named, ast.Constant) and named.value not in own:
                names = [str(named.value)]
        found += [f"line {node.lineno}: {name}" for name in names if _is_private(name)]
    return found


@functools.cache
def own_names() -> set[str]:
    """The private names that remat's own files define."""
    return PYTHONS.union(*(_own_names(ast.parse(p.read_text())) for p in FILES))


#: What is private to pytest, click and highspy, by the one file that uses it.
OTHERS = {
    "testing/plugin.py": {"_arg2fixturedefs", "_calls"},
    "solvers/highs.py": {"_Highs"},
}


def test_nothing_private_of_pytorch_is_used_elsewhere() -> None:
    found = {}
    for path in FILES:
        name = str(path.relative_to(ROOT))
        found[name] = private_uses(path.read_text(), own_names() | OTHERS.get(name, set()))
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._ops import OpOverload",
        "def f():\n    import torch._dynamo",
        "from torch.utils import _pytree as pytree",
        "x = torch._ops.OpOverload",
        "x = tensor.untyped_storage()._cdata",
        "importlib.import_module('torch._prims.rng_prims')",
        "x = getattr(op, '_schema', None)",
    ],
)
def test_a_private_use_is_found(source: str) -> None:
    assert private_uses(source, own_names())


@pytest.mark.parametrize(
    "source",
    [
        "from remat.torch_compat import pytree",
        "x = torch.ops.aten._softmax.default",
        "x = self._mode",
        "x = torch.__version__",
        "from torch.utils.checkpoint import checkpoint",
        "'''See torch._ops.'''",
    ],
)
def test_what_is_public_passes(source: str) -> None:
    assert private_uses(source, own_names()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor, when it is first imported
def test_every_name_is_there() -> None:
    assert all(getattr(torch_compat, name) is not None for name in torch_compat.HOMES)


def test_what_is_missing_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        torch_compat.HOMES, "gone", ("torch._moved:Gone", "torch._ops:OpGone", "torch._ops:_gone")
    )
    with pytest.raises(TorchVersionError) as caught:
        _ = torch_compat.gone  # type: ignore[attr-defined]
    assert isinstance(caught.value, RematError)
    said = str(caught.value)
    assert torch.__version__ in said
    assert "torch._moved.Gone or torch._ops.OpGone or torch._ops._gone" in said
    assert "install" in said


def test_another_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = ("torch._moved:OpOverload", "torch._ops:OpOverload")
    monkeypatch.setitem(torch_compat.HOMES, "moved", homes)
    assert torch_compat.moved is torch_compat.OpOverload  # type: ignore[attr-defined]
    del torch_compat.__dict__["moved"]


def test_a_library_that_pytorch_lacks_is_no_matter_of_its_version() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        torch_compat.look_up(("no_such_library:x",))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'OpOverlaod'"):
        _ = torch_compat.OpOverlaod  # type: ignore[attr-defined]


def test_the_module_by_itself_imports_no_torch_and_looks_nothing_up() -> None:
    script = (
        "import sys; from remat import torch_compat; "
        "assert 'torch' not in sys.modules; "
        "assert not set(torch_compat.HOMES) & set(vars(torch_compat))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


#: What capturing, planning and compiling need not: text files, selective checkpointing, solvers
#: for PyTorch's own partitioner.
SPARE = ("CapturedTraceback", "CustomKnapsackSolver", "ValueRanges", "estimate_runtime")


@pytest.mark.slow
def test_imports_tell_of_no_version_and_what_it_lacks_harms_only_what_needs_it() -> None:
    script = f"""
from remat import torch_compat
homes = {{name: torch_compat.HOMES[name] for name in {SPARE!r}}}
torch_compat.HOMES |= dict.fromkeys(homes, ("torch._gone:gone",))
import torch, remat, warnings
torch.__version__ = torch.torch_version.TorchVersion("2.99.0+cpu")
with warnings.catch_warnings():
    warnings.simplefilter("error", torch_compat.TorchVersionWarning)
    import remat.integrations.partitioner, remat.integrations.backend
joint = remat.capture(lambda x: (x.sin() @ x).sum(), (torch.ones(4, 4, requires_grad=True),), lower="eager")
assert "sin" in remat.plan(joint).explain()
try:
    torch_compat.ValueRanges
except remat.RematError as error:
    assert torch.__version__ in str(error)
else:
    raise AssertionError
torch_compat.HOMES |= homes
torch_compat.check_version.cache_clear()
with warnings.catch_warnings():
    warnings.simplefilter("error", torch_compat.TorchVersionWarning)
    import remat.integrations.torch_knapsack
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def _double(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def _compile() -> None:
    x = torch.ones(4, requires_grad=True)
    torch.compile(_double, backend="remat", options={"lower": "eager"})(x)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A PyTorch that nobody has tested, and a process that has not heard of it."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("3.0.0a0+git1234"))
    torch_compat.check_version.cache_clear()
    yield torch.__version__
    torch_compat.check_version.cache_clear()


DOORS = pytest.mark.parametrize(
    "use",
    [
        lambda: remat.capture(_double, (torch.ones(4, requires_grad=True),), lower="eager"),
        lambda: remat.partitioner(),
        lambda: remat.torch_solver("greedy"),
        _compile,
    ],
    ids=["capture", "partitioner", "torch_solver", "compile"],
)


@DOORS
def test_every_door_refuses_an_older_pytorch(
    use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0+cu128"))
    torch_compat.check_version.cache_clear()
    said = "remat needs PyTorch 2.11 or newer; this is 2.10.0+cu128: install a newer PyTorch"
    with pytest.raises(Exception, match=re.escape(said)):
        use()


@DOORS
def test_every_door_tells_of_a_newer_pytorch(use: Callable[[], object], newer: str) -> None:
    with pytest.warns(TorchVersionWarning) as told:
        use()
    (said,) = [str(w.message) for w in told if w.category is TorchVersionWarning]
    use()  # once: warnings are errors in tests
    assert newer in said
    assert ", ".join(torch_compat.TESTED) in said
    assert "warnings.filterwarnings('ignore', message='remat is tested with PyTorch')" in said


@pytest.mark.usefixtures("newer")
def test_the_warning_is_silenced_as_it_says() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="remat is tested with PyTorch")
        torch_compat.check_version()  # warnings are errors in tests


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("version", ["2.11.0", "2.13.0", "2.15.0+cu132", "2.15.7"])
def test_a_tested_pytorch_goes_without_a_word(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    torch_compat.check_version()


def test_this_pytorch_is_one_of_those_tested() -> None:
    assert any(torch.__version__.startswith(f"{v}.") for v in torch_compat.TESTED)
