"""The life of ``--budget``: from the command to the compiled kernel by few files, none entered twice."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import remat
from remat.cli import main
from remat.planning import planner
from remat.solvers.hull import Hull
from remat.solvers.kernel import kernel
from remat.units import Budget

ROOT = Path(remat.__file__).parent
#: Files on the way, the kernel's own included, at most.
MOST = 10
MODEL = """
import torch

def mlp():
    torch.manual_seed(0)
    sizes = (64, 96, 32, 80, 48, 72, 40)
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(a, b), torch.nn.GELU(), torch.nn.LayerNorm(b)]
    return torch.nn.Sequential(*layers), (torch.randn(24, 64),)
"""


def chain() -> tuple[str, ...]:
    """The files of remat that the calls under way go through, from the command down."""
    frame = sys._getframe(2)
    found: list[str] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            found.append(path.relative_to(ROOT).as_posix())
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(name for name, _ in groupby(reversed(found)))


@pytest.mark.skipif(kernel() is None, reason="the kernel is not compiled here")
def test_few_files_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, ...]] = set()
    parsed: list[tuple[str, ...]] = []
    compiled, parse = Hull.compiled, Budget.parse

    class Watched:
        """The core in the kernel; whatever is asked of it is written down."""

        def __init__(self, core: Any) -> None:
            self._core = core

        def __getattr__(self, name: str) -> Any:
            def ask(*args: Any) -> Any:
                asked.add(chain())
                return getattr(self._core, name)(*args)

            return ask

    def read(text: object) -> Budget:
        if chain()[-1] != "units.py":  # where it takes text apart
            parsed.append(chain())
        return parse(text)

    monkeypatch.setattr(Hull, "compiled", lambda self, edge: Watched(compiled(self, edge)))
    monkeypatch.setattr(Budget, "parse", read)
    (tmp_path / "way_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = CliRunner().invoke(
        main, ["plan", "way_models.py:mlp", "--budget", "0.37", "--lower", "eager", "--explain"]
    )
    sys.modules.pop("way_models", None)
    assert done.exit_code == 0, done.output
    assert len(parsed) == 1, "the budget is read once"
    assert asked, "the kernel was asked"
    assert all(way[0] == "cli/commands.py" for way in (*asked, *parsed))
    for way in (*asked, *parsed):
        assert len(set(way)) == len(way), f"a file is entered twice: {way}"
    files = {name for way in (*asked, *parsed) for name in way}
    files |= {"units.py", "solvers/_native/module.cpp"}  # behind the two watched calls
    assert len(files) <= MOST, sorted(files)
    told = re.findall(r"^    (\S+\.(?:py|cpp))", planner.__doc__ or "", re.MULTILINE)
    assert set(told) == files, "the planner's docstring lists them"
    assert len(told) == len(files)
