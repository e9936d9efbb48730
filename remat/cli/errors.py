"""How a command fails: a line on standard error, or an object of JSON under ``--json``, and its exit code."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import click

from remat.cli import params
from remat.errors import RematError

#: Exit code of a command that Ctrl-C ended: 128 and the number of the signal.
INTERRUPTED = 130


def asks_for_json(args: Sequence[str]) -> bool:
    """Whether a command line has ``--json``, before it is known to be right."""
    return "--json" in args[: args.index("--")] if "--" in args else "--json" in args


def echo_error(
    error: RematError | click.ClickException, result: Mapping[str, Any] | None = None
) -> None:
    """Print an error as a JSON object, beside the results that the command has found."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    described = {"kind": type(error).__name__, "message": params.one_line(message)}
    click.echo(json.dumps({**(result or {}), "error": described}, indent=2))


def fail(error: RematError, result: Mapping[str, Any] | None) -> NoReturn:
    """Ends a command that has printed what it found, or prints that as JSON with the error in it.

    Args:
        error: why it fails all the same.
        result: what it found; None where it was printed for people.
    """
    if result is None:
        raise error
    echo_error(error, result)
    raise click.exceptions.Exit(1)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends a command in one line; click by itself would exit with 1, as if the job had failed."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, without the line of ours that warns."""
    click.echo(f"warning: {params.one_line(message)}", err=True)


def tell_refused_plugins() -> None:
    """Plugins that were refused, one paragraph each; quiet if none was asked for."""
    registries = sys.modules.get("remat.plugins.registry")
    if registries is None:
        return
    for problem in registries.registry().problems:
        click.echo(f"warning: {params.one_line(problem)}", err=True)
