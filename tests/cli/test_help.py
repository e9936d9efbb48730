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
    named = main.commands[name]
    context = click.Context(named, info_name=name, **named.context_settings)
    _, left, _ = named.make_parser(context).parse_args(words)
    assert left == []


def test_a_value_is_named_by_its_unit() -> None:
    shown = CliRunner().invoke(main, ["plan", "--help"]).output
    assert "--time-limit SECONDS " in shown


def test_a_missing_file_is_found_before_pytorch_is_imported(tmp_path: Path) -> None:
    lines = (
        "plan missing.py:build",
        "fit missing.py:build --memory 8GiB",
        "opt missing.py:build --passes cse",
        "sweep missing.py:build --costs roofline",
        "sac missing.py:build --memory 0.5 --cost roofline",
        "diff missing.json other.json",
    )
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom remat.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    done = CliRunner().invoke(main, line.split())\n"
        "    assert done.exit_code == 2, line\n"
        "    assert 'missing.' in done.stderr, line\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    subprocess.run([sys.executable, "-c", code, *lines], cwd=tmp_path, check=True)
