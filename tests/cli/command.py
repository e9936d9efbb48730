"""The command in this process, without its stages: what it tells of them has tests of its own."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from remat.cli import main


def run(*args: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [*args, "--quiet"], input=text)


def shown(*args: str, text: str | None = None) -> str:
    """What a command prints that succeeds."""
    done = run(*args, text=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*args: str) -> Any:
    """What a command that succeeds tells machines."""
    return json.loads(shown(*args, "--json"))
