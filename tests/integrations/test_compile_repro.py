"""What a compilation leaves behind that fails where it should not, and that nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import remat
from remat.cli import main
from remat.errors import BudgetError, PassError, ProblemError, VerifyError
from remat.integrations.partitioner import Partitioner
from remat.passes.core.state import PassResult, State
from remat.passes.instruments.reproducer import folder_for, read_reproducer
from remat.passes.split.partition import Partition
from remat.passes.split.reorder_backward import ReorderBackward
from remat.planning import finish
from tests.graph.capture.test_step import ALONE, overwrites_saved
from tests.passes.instruments.sample import TEXT, step
from tests.passes.instruments.solvers import Crashes

CRASHES = f"{Crashes.__module__}:Crashes"


def train(**options: Any) -> None:
    torch._dynamo.reset()
    w = torch.randn(64, 64, requires_grad=True)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().sum()

    options = {"lower": "eager", "budget": 0.1, "cost": "flops", **options}
    torch.compile(f, backend="remat", options=options)(torch.randn(8, 64), w).backward()


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of these tests goes where real failures go."""
    monkeypatch.setenv("REMAT_REPRO_DIR", str(tmp_path / "by-variable"))


def only_folder(inside: Path) -> Path:
    (made,) = inside.iterdir()
    return made


def again(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["repro", str(folder)])
    return done.exit_code, done.stdout


def test_a_solver_that_crashes(tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match=r"'crashes' raised ZeroDivisionError(.|\n)*reproducer: "
    ) as caught:
        train(solver=CRASHES)
    assert "without remat" not in str(caught.value), "PyTorch alone compiles it"
    made = only_folder(tmp_path / "by-variable")
    assert made.name.startswith("remat-repro-plan-")
    instance = remat.load_instance(made / "problem.json")
    assert instance.full_bytes is not None
    assert instance.full_bytes > 0
    assert "solver=" in read_reproducer(made).pipeline
    code, told = again(made)
    assert code == 1
    assert told.split()[:2] == ["outcome", "reproduced"]
    assert "SolverError: solver 'crashes' raised ZeroDivisionError" in told


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_what_pytorch_cannot_compile_says_so_and_leaves_no_reproducer(
    lower: str, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    f = torch.compile(overwrites_saved, backend="remat", options={"lower": lower})
    with pytest.raises(Exception, match=f"modified by an inplace operation(.|\n)*{ALONE}"):
        f(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    assert list(tmp_path.iterdir()) == []


def test_the_option_goes_before_the_variable(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="ZeroDivisionError") as caught:
        split(solver=CRASHES, budget=0.1, repro=False)
    assert "reproducer" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Exception, match="reproducer: "):
        train(solver=CRASHES, repro=str(tmp_path / "by-option"))
    only_folder(tmp_path / "by-option")
    assert not (tmp_path / "by-variable").exists()


def test_a_budget_that_cannot_be_met_is_no_failure_of_ours(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="must save at least 256 bytes") as caught:
        split(TEXT.replace("  # model.py:3", ", must_save  # model.py:3"), budget="saved:8B")
    assert isinstance(caught.value, BudgetError)
    assert list(tmp_path.iterdir()) == []


def split(text: str = TEXT, **options: Any) -> Any:
    """Hands a joint graph to the partitioner, as AOTAutograd does."""
    return Partitioner(**options)(step(text).graph_module, [None], num_fwd_outputs=1)


def crash(self: object, state: State) -> PassResult:
    raise IndexError("nobody thought of this")


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Partition, "'partition' failed"), (ReorderBackward, "'reorder-backward' failed")],
)
def test_a_pass_that_crashes(
    kind: type[remat.Pass], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "run", crash)
    with pytest.raises(PassError, match=message):
        split()
    made = only_folder(tmp_path / "by-variable")
    assert "dce and cse, had changed it already" in (made / "README.txt").read_text()
    assert "unread" not in (made / "graph.joint").read_text()
    assert again(made)[0] == 1
    monkeypatch.undo()
    code, told = again(made)
    assert (code, told.splitlines()[0].split()) == (0, ["outcome", "no", "longer", "fails"])


def test_halves_that_the_verifier_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(split: object) -> None:
        raise VerifyError("graph 'joint' was split wrongly: nothing may be broken")

    monkeypatch.setattr(finish, "verify", refuse)
    with pytest.raises(VerifyError, match="nothing may be broken"):
        split(budget=0.5)
    made = only_folder(tmp_path / "by-variable")
    assert made.name.startswith("remat-repro-plan-")
    code, told = again(made)
    assert code == 1
    assert told.split()[:4] == ["outcome", "reproduced", "error", "VerifyError:"]


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": "dce,cse,min-cut,partition"},
        {"budget": remat.Peak("1MiB")},
        {"time_limit": 5.0},
        {"hooks": "float8"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_a_plan_is_seen_again(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Partition, "run", crash)
    with pytest.raises(PassError):
        split(**options)
    code, told = again(only_folder(tmp_path / "by-variable"))
    assert (code, told.split()[:2]) == (1, ["outcome", "reproduced"])


def test_where_reproducers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_for(None) == tmp_path / "by-variable"
    assert folder_for("here") == Path("here")
    assert folder_for(False) is None
    monkeypatch.setenv("REMAT_REPRO_DIR", "")
    assert folder_for(None) is None
    monkeypatch.delenv("REMAT_REPRO_DIR")
    default = folder_for(None)
    assert default is not None
    assert default.name.startswith("remat-repro-of-")
    for wrong in (7, "", b"x"):
        with pytest.raises(ProblemError, match="expected the path of a folder, or False"):
            folder_for(wrong)
    with pytest.raises(ProblemError, match="repro is 7"):
        remat.partitioner(repro=7)  # type: ignore[arg-type]
