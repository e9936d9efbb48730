"""The help of the command: groups, and an example of each command that its options allow."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from remat.cli import main
from remat.cli.commands import HELP

EXAMPLES = {name: example for group in HELP.values() for name, example in group.items()}


def test_every_command_is_in_one_group() -> None:
    assert sorted(EXAMPLES) == sorted(main.commands)
    assert sum(map(len, HELP.values())) == len(EXAMPLES)
    shown = CliRunner().invoke(main, ["--help"]).output
    places = [shown.index(f"\n{title}:\n") for title in HELP]
    assert places == sorted(places)
    assert "Commands:" not in shown


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_help_of_a_command_ends_with_an_example_that_it_takes(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"]).output
    assert " ".join(shown.split()).endswith(f"Example: {EXAMPLES[name]}")
    program, command, *words = shlex.split(EXAMPLES[name])
    assert (program, command) == ("remat", name)
    context = click.Context(main.commands[name], info_name=name)
    _, left, _ = main.commands[name].make_parser(context).parse_args(words)
    assert left == []


@pytest.mark.parametrize(
    "words",
    ["plan MODEL", "fit MODEL --memory 8GiB", "opt MODEL --passes cse", "sweep MODEL --costs roofline",
     "sac MODEL --memory 0.5 --cost roofline", "diff missing.json other.json"],
)  # fmt: skip
def test_a_missing_file_is_found_before_pytorch_is_imported(words: str, tmp_path: Path) -> None:
    words = words.replace("MODEL", "missing.py:build")
    code = (
        "import sys\nfrom remat.cli import main\n"
        "try: main(sys.argv[1:])\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert "missing." in done.stderr
    assert done.stderr.endswith("False\n")
