"""The help of the command: groups, and an example of each command that its options allow."""

from __future__ import annotations

import shlex

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
