"""Folders that are damaged, read-only or full: a step compiles and trains, and says so at most once."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import ProblemError
from remat.experiments.table import Sweep
from remat.graph.costs import CostWarning
from remat.graph.costs import store as stores
from remat.integrations import plan_cache
from remat.integrations.budget_loop import Attempt
from remat.integrations.compiled_budget import CompiledBudget
from remat.integrations.partitioner import Partitioner
from remat.integrations.plan_cache import CachedPlan
from remat.integrations.stages import Arrived
from remat.passes.instruments.reproducer import folder_for

NAME = "profile-v2.sqlite"
#: Where a file system refuses: of a folder that is read-only, or of a disk that is full.
FAULTS = [
    (Path, "open", errno.EROFS),
    (os, "fsync", errno.ENOSPC),
    (Path, "replace", errno.EACCES),
    (Path, "mkdir", errno.EROFS),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for measured costs; it is not there yet."""
    made = tmp_path / "costs"
    monkeypatch.setenv("REMAT_CACHE", str(made))
    stores.store.cache_clear()
    return made


def train() -> list[torch.Tensor]:
    """Gradients of a step that is planned by measured costs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    options = {"budget": 0.0, "lower": "eager", "cost": "profile"}
    step = torch.compile(model, backend="remat", options=options)
    return list(torch.autograd.grad(step(torch.ones(2, 4)).sum(), list(model.parameters())))


def warned_of() -> list[str]:
    """What two steps warn of; they train as they do without remat."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for gradient, other in zip(train(), expected, strict=True):
                torch.testing.assert_close(gradient, other)
    return [str(w.message) for w in caught if issubclass(w.category, CostWarning)]


Patch = pytest.MonkeyPatch


def garbage(folder: Path, patch: Patch) -> None:
    folder.mkdir()
    (folder / NAME).write_bytes(b"\x00\xff")


def a_folder_in_its_place(folder: Path, patch: Patch) -> None:
    (folder / NAME).mkdir(parents=True)


def a_file_in_the_folder_s_place(folder: Path, patch: Patch) -> None:
    folder.write_text("mine")


def a_folder_where_it_is_put_aside(folder: Path, patch: Patch) -> None:
    garbage(folder, patch)
    (folder / f"{NAME}.corrupt").mkdir()


def a_full_disk(folder: Path, patch: Patch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    patch.setattr(sqlite3, "connect", full)


def garbage_on_a_full_disk(folder: Path, patch: Patch) -> None:
    garbage(folder, patch)
    a_full_disk(folder, patch)


@pytest.mark.parametrize(
    "damage",
    [
        garbage,
        a_folder_in_its_place,
        a_file_in_the_folder_s_place,
        a_folder_where_it_is_put_aside,
        a_full_disk,
        garbage_on_a_full_disk,
    ],
)
def test_a_damaged_cache_of_costs_is_in_nobody_s_way(
    folder: Path, damage: Callable[[Path, Patch], None], monkeypatch: Patch
) -> None:
    damage(folder, monkeypatch)
    (message,) = warned_of()
    assert str(folder) in message
    assert "point REMAT_CACHE to another folder" in message
    assert not list(folder.parent.rglob("*.part"))


def test_what_is_wrong_with_a_folder_is_not_kept_with_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that finds the step has a folder of its own."""
    folder.write_text("no folder")
    joint = remat.capture(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), (torch.ones(2, 4),))
    options = Partitioner(budget=0.0, cost="profile")
    step = Arrived(options=options, earlier=frozenset(), watched=True)
    attempt = Attempt(step, CompiledBudget(), has_two_graphs=True, traces="")
    with pytest.warns(CostWarning, match="cannot be used"):
        attempt(joint.graph_module, [None], num_fwd_outputs=joint.num_fwd_outputs)
    assert attempt.record is not None
    assert attempt.record.warnings == ()


@pytest.mark.parametrize(("where", "what", "code"), FAULTS)
def test_a_step_that_cannot_be_kept_is_not_there(
    tmp_path: Path, where: Any, what: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keys = ["a", "b"]

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(where, what, refuse)
        plan_cache.keep(keys, CachedPlan(joint="text"))
    assert plan_cache.find(keys) is None
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    plan_cache.keep(keys, CachedPlan(joint="text"))
    assert plan_cache.find(keys) == CachedPlan(joint="text")


def test_where_there_is_no_folder_for_plans_none_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "caches"))
    plan_cache.keep(["a", "b"], CachedPlan())
    assert plan_cache.find(["a", "b"]) is None
    there = tmp_path / "caches"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(there))
    plan_cache.keep(["a", "b"], CachedPlan())
    (file,) = (p for p in there.rglob("*.json"))
    file.unlink()
    file.mkdir()
    plan_cache.keep(["a", "b"], CachedPlan())
    assert plan_cache.find(["a", "b"]) is None


def nowhere(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_without_a_folder_for_temporary_files_a_step_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMAT_REPRO_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert folder_for(None) is None, "a failure leaves no reproducer"
    assert warned_of() == []


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), (torch.ones(2, 4),), {}


def test_a_sweep_on_a_full_disk_goes_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "table.jsonl"
    given: dict[str, Any] = {"models": {"m": model}, "solvers": "greedy", "output": output}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as broken,
        pytest.raises(ProblemError, match=r"cannot be written: No space.*goes on from"),
    ):
        remat.sweep(
            **given,
            budgets=(0.3, 0.6),
            on_row=lambda _: broken.setattr("remat.experiments.journal.os.fsync", full),
        )
    assert Sweep.load(output).rows[0].budget == "0.3"
    assert not list(tmp_path.glob("*.lock"))
    assert len(remat.sweep(**given, budgets=(0.3, 0.6)).rows) == 2
    assert len(Sweep.load(output).rows) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["table.jsonl"]
