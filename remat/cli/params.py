"""Option values that are checked before any work is done; a bad one is wrong usage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.errors import RematError

if TYPE_CHECKING:
    from remat.planning.pipelines import PassManager

    ParamType = click.ParamType[Any]
else:  # a class without parameters before click 8.4
    ParamType = click.ParamType


class Checked(ParamType):
    """A value that remat itself reads; what it refuses is a bad parameter.

    Args:
        name: what it is, for the help.
        read: makes it of the text.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._read(value)
        except RematError as error:
            self.fail(one_line(error), param, ctx)


def one_line(error: Exception | str) -> str:
    """The message of an error or a warning in one line."""
    return " ".join(str(error).split())


def _seconds(text: str) -> float:
    from remat.solvers.run import check_time_limit

    try:
        limit = float(text)
    except ValueError:
        raise RematError(f"'{text}' is no number of seconds") from None
    check_time_limit(limit)
    return limit


def _cost_model(text: str) -> Any:
    from remat.plugins.registry import registry

    return registry().cost_model(text)


def search_here() -> None:
    """Lets an argument name a module in the working directory.

    What is installed comes first: a ``torch.py`` that lies there is never imported in PyTorch's place.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _solver_text(text: str) -> str:
    if ":" in text:
        search_here()
    return text


def _solver_name(text: str) -> str:
    from remat.plugins.registry import registry

    registry().solver_class(_solver_text(text))
    return text


def _solver(text: str) -> Any:
    from remat.plugins.registry import registry

    return registry().solver(_solver_text(text))


#: Seconds, above 0.
SECONDS = Checked("seconds", _seconds)
#: A registered cost model, with an argument behind a colon.
COST_MODEL = Checked("cost model", _cost_model)
#: A solver that the command looks up later.
SOLVER = Checked("solver", _solver_text)
#: A registered solver, whether or not it can run here, or ``module:Class``.
SOLVER_NAME = Checked("solver", _solver_name)


def check_file(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse a MODEL whose file is missing, before any other option is read: reading those imports PyTorch."""
    for spec in (value,) if isinstance(value, str) else value:
        path, _, _ = spec.rpartition(":")
        if path.endswith(".py") and not Path(path).is_file():
            raise click.UsageError(f"MODEL is '{spec}', but there is no file '{path}'", ctx)
    return value


class PipelineType(ParamType):
    """Passes with commas between them, as `remat.PassManager.parse` reads them."""

    name = "passes"

    def convert(self, value: Any, param: Any, ctx: Any) -> PassManager:
        from remat.passes.core.ordering import check_partitioned
        from remat.planning.pipelines import PassManager
        from remat.solvers.base import Solver

        try:
            made = PassManager.parse(value, readers={Solver: _solver})
            check_partitioned(made.passes)
            return made
        except RematError as error:
            self.fail(str(error).partition("\n")[0], param, ctx)  # what follows shows the column


class OutputFile(click.Path):
    """A file to write, in a folder that exists: known before any work is done.

    Args:
        suffixes: ends of names that it may have; none: any.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        from remat.files import resolved

        if not str(value):
            self.fail("the name of the file is empty", param, ctx)
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail(f"the name {str(value)!r} is no text in UTF-8", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        try:
            folder = resolved(path).parent
        except OSError as error:
            self.fail(f"'{path}' cannot be written: {error.strerror}", param, ctx)
        if not folder.is_dir():
            self.fail(f"there is no folder '{folder}'", param, ctx)
        is_stream = path.exists() and not path.is_file()
        if self.suffixes and path.suffix.lower() not in self.suffixes and not is_stream:
            expected = " or ".join(self.suffixes)
            self.fail(f"'{path}' ends with '{path.suffix}'; expected {expected}", param, ctx)
        return path


#: A picture to draw, in the formats of `remat.report.pictures.FORMATS`.
PICTURE_FILE = OutputFile(".svg", ".png")


def check_there(path: Path, what: str, expected: str = "") -> None:
    """Refuses an input that is missing.

    Raises:
        click.UsageError: there is nothing at the path.
    """
    if not path.exists():
        raise click.UsageError(
            f"there is no {what} '{path}'" + (f"; {expected}" if expected else "")
        )


def write(path: Path, text: str, what: str) -> None:
    """Writes what was asked for with an `OutputFile`.

    Args:
        path: where to.
        text: the content.
        what: what it is, for the message.

    Raises:
        RematError: it cannot be written.
    """
    from remat.files import write_atomic, writing

    with writing(path, what=what, error=RematError):
        write_atomic(path, text)


class DeviceType(ParamType):
    """A device as PyTorch writes it."""

    name = "device"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        import torch

        try:
            torch.device(value)
        except RuntimeError as error:
            self.fail(f"'{value}' is no device: {str(error).splitlines()[0]}", param, ctx)
        return str(value)


class ListOf(ParamType):
    """Values of one type with commas between them."""

    def __init__(self, item: ParamType) -> None:
        self.item = item
        self.name = f"{item.name},…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail(f"'{value}' is an empty list", param, ctx)
        return tuple(self.item.convert(part, param, ctx) for part in parts)
