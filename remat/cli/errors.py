"""Errors and warnings of commands: one line on standard error, or JSON under ``--json``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import click

from remat.cli import params
from remat.errors import RematError

#: Exit code of a command that Ctrl-C ended: 128 plus the number of the signal SIGINT.
INTERRUPTED = 130


def asks_for_json(args: Sequence[str]) -> bool:
    """Return whether a command line contains the option ``--json``, without parsing the line."""
    return "--json" in args[: args.index("--")] if "--" in args else "--json" in args


def echo_error(
    error: RematError | click.ClickException, result: Mapping[str, Any] | None = None
) -> None:
    """Print an error as a JSON object, together with results of the command.

    Args:
        error: the error.
        result: results to print in the same object; None for no results.
    """
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    described = {"kind": type(error).__name__, "message": params.one_line(message)}
    click.echo(json.dumps({**(result or {}), "error": described}, indent=2))


def fail(error: RematError, result: Mapping[str, Any] | None) -> NoReturn:
    """End a command that failed but has some results.

    Args:
        error: the reason for the failure.
        result: the results, to be printed as JSON together with the error. None if the command has
            already printed its results as text.

    Raises:
        RematError: ``error``, if ``result`` is None.
        click.exceptions.Exit: with code 1, if ``result`` was printed.
    """
    if result is None:
        raise error
    echo_error(error, result)
    raise click.exceptions.Exit(1)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the command with exit code 130 and one line if Ctrl-C interrupts the block.

    Click alone would exit with 1, as if the command had failed.
    """
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without the source line that `warnings` adds by default."""
    click.echo(f"warning: {params.one_line(message)}", err=True)


def tell_refused_plugins() -> None:
    """Print, for each plugin that remat refused to load, one line with the reason.

    The lines go to standard error. Nothing is printed if the command did not look for plugins.
    """
    registries = sys.modules.get("remat.plugins.registry")
    if registries is None:
        return
    for problem in registries.registry().problems:
        click.echo(f"warning: {params.one_line(problem)}", err=True)
