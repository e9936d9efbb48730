"""Plugins as a stranger has them: installed in an environment of their own."""

from __future__ import annotations

import site
import subprocess
import venv
from pathlib import Path


def environment(folder: Path, *installed: object) -> Path:
    """The interpreter of a fresh environment that borrows our packages, with what pip is told to install."""
    venv.create(folder / "venv", with_pip=False)
    interpreter = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    borrowed = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "borrowed.pth").write_text("".join(borrowed))
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    output(*pip, "--no-index", "--no-deps", *installed, cwd=folder)
    return interpreter


def output(*command: object, cwd: Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: Defines a command of remat's as a function that returns what it prints.
COMMAND = """
from click.testing import CliRunner
from remat.cli import main

def command(*arguments):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout
"""
