"""`make` keeps an environment for each file of versions, PyTorch and Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def would_run(*arguments: str) -> str:
    """What `make` would do for a first time."""
    return make("--dry-run", "--always-make", *arguments)


def make(*arguments: str, folder: Path = ROOT) -> str:
    """What `make` prints, without the variables of a `make` that runs these tests."""
    own = {
        k: v
        for k, v in os.environ.items()
        if k not in ("MAKEFLAGS", "MAKEOVERRIDES", "TORCH", "PYTHON", "CONSTRAINTS")
    }
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], ".venv"),
        (["PYTHON=/usr/bin/python3"], ".venv"),
        (["TORCH=2.15.0"], ".venv-torch-2.15.0"),
        (["PYTHON=/opt/bin/python3.12"], ".venv-python3.12"),
        (["TORCH=2.14.1", "PYTHON=python3.13"], ".venv-torch-2.14.1-python3.13"),
        (
            ["CONSTRAINTS=constraints-newest.txt", "PYTHON=python3.12"],
            ".venv-newest-python3.12",
        ),
    ],
)
def test_each_combination_has_a_folder_of_its_own(arguments: list[str], folder: str) -> None:
    said = would_run("test", *arguments)
    assert f"{folder}/bin/python -m pytest" in said
    assert f"-m venv {folder}\n" in said
    assert f"touch {folder}/.installed" in said


def test_the_version_of_pytorch_replaces_the_one_of_the_constraints() -> None:
    (line,) = [
        x for x in would_run("test", "TORCH=2.15.0").splitlines() if "constraints.txt >" in x
    ]
    written = line.partition(">")[0]
    said = subprocess.run(written, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    before = (ROOT / "constraints.txt").read_text().splitlines()
    after = said.stdout.splitlines()
    assert [x for x in after if x.startswith("torch=")] == ["torch==2.15.0"]
    gone = sorted(x.partition("==")[0] for x in set(before) - set(after))
    assert gone == ["setuptools", "torch"], "each PyTorch asks for a setuptools of its own"


@pytest.mark.parametrize("constraints", ["constraints.txt", "constraints-newest.txt"])
def test_the_versions_are_those_of_the_file(constraints: str) -> None:
    said = would_run("test", f"CONSTRAINTS={constraints}")
    assert f"cat {constraints} > " in said
    names = [
        line.partition("==")[0].lower()
        for line in (ROOT / constraints).read_text().splitlines()
        if not line.startswith("#")
    ]
    assert len(names) == len(set(names))
    assert {"cbcbox", "numpy", "pulp", "torch", "torch_remat"} <= set(names)


def test_the_demo_installs_what_it_needs_and_no_more(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())

    def would_install(*arguments: str) -> list[str]:
        said = make("--dry-run", *arguments, folder=tmp_path)
        return [line for line in said.splitlines() if "pip install" in line]

    (demo,) = would_install("demo")
    assert demo.endswith("-e '.[hf,plot]'")
    (everything,) = would_install("test")
    assert everything.endswith("-e '.[dev]'")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert would_install("demo") == [], "where all is installed, so is that"
