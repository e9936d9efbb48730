"""Parameter types that check an option's value before any work is done, and refuse invalid values as wrong usage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.arguments import SOLVER as DEFAULT_SOLVER
from remat.errors import RematError, first_line

if TYPE_CHECKING:
    from remat.planning.pipelines import PassManager

    ParamType = click.ParamType[Any]
else:  # before click 8.4, the class takes no type parameter
    ParamType = click.ParamType


class Checked(ParamType):
    """Parameter type whose values a function of remat parses.

    Args:
        name: name of the type in the help.
        read: function that converts the option's text to the value. A `RematError` that the function raises becomes
            wrong usage.
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
    """Return the message of an error or warning in one line."""
    return " ".join(str(error).split())


def _cost_model(text: str) -> Any:
    from remat.plugins.registry import registry

    return registry().cost_model(text)


def search_here() -> None:
    """Add the working directory to the search path of modules, so that arguments may name modules there."""
    # The directory is appended after installed packages, so that a file `torch.py` in it is never imported
    # instead of PyTorch.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _solver_name(text: str) -> str:
    # Plugins are not loaded for the default, so that `remat run` starts quickly.
    if text == DEFAULT_SOLVER:
        return text
    from remat.plugins.registry import registry

    if ":" in text:
        search_here()
    registry().solver_class(text)
    return text


def _solver(text: str) -> Any:
    from remat.plugins.registry import registry

    return registry().solver(_solver_name(text))


def _memory(text: str) -> str:
    from remat.sac.solve.milp import read_memory

    read_memory(text)
    return text


def _device(text: str) -> str:
    import torch

    try:
        torch.device(text)
    except RuntimeError as error:
        raise RematError(f"'{text}' is no device: {first_line(error)}") from None
    return text


def _pipeline(text: str) -> PassManager:
    from remat.passes.core.ordering import check_partitioned
    from remat.planning.pipelines import PassManager
    from remat.solvers.base import Solver

    try:
        pipeline = PassManager.parse(text, readers={Solver: _solver})
        check_partitioned(pipeline.passes)
    except RematError as error:
        # Further lines of the message mark a column of the pipeline's text. The command prints errors in one line.
        raise RematError(first_line(error)) from None
    return pipeline


#: Parameter type: a number of seconds above 0.
SECONDS = click.FloatRange(min=0, min_open=True)
#: Parameter type: the name of a registered cost model, with an optional argument after a colon.
COST_MODEL = Checked("cost model", _cost_model)
#: Parameter type: the name of a registered solver, even if the solver cannot run here, or ``module:Class``.
SOLVER = Checked("solver", _solver_name)
#: Parameter type: a device in PyTorch's notation, such as ``cuda:0``.
DEVICE = Checked("device", _device)
#: Parameter type: a limit on the peak of eager code, in bytes or as a ratio.
MEMORY = Checked("memory", _memory)
#: Parameter type: a pipeline of passes, as text for `remat.PassManager.parse`.
PIPELINE = Checked("passes", _pipeline)


def check_file(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Callback of click: raise a UsageError if a MODEL is in a file that does not exist."""
    # The argument MODEL is eager: click calls this function before it parses the options, which imports PyTorch.
    for spec in (value,) if isinstance(value, str) else value:
        path, _, _ = spec.rpartition(":")
        if path.endswith(".py") and not Path(path).is_file():
            raise click.UsageError(f"MODEL is '{spec}', but there is no file '{path}'", ctx)
    return value


#: Parameter type: a file to read, which must exist.
INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class OutputFile(click.Path):
    """Parameter type for a file to write; the folder must exist, and the suffix must be one of ``suffixes``, if any."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        from remat.files import is_stream, resolved

        if not str(value):
            self.fail("the name of the file is empty", param, ctx)
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail(f"the name {str(value)!r} is no text in UTF-8", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        try:
            folder = resolved(path).parent
            # Streams such as /dev/stdout have no suffix.
            suffixes = () if is_stream(path) else self.suffixes
        except OSError as error:
            self.fail(f"'{path}' cannot be written: {error.strerror}", param, ctx)
        if not folder.is_dir():
            self.fail(f"there is no folder '{folder}'", param, ctx)
        if suffixes and path.suffix.lower() not in suffixes:
            expected = " or ".join(suffixes)
            self.fail(f"'{path}' ends with '{path.suffix}'; expected {expected}", param, ctx)
        return path


#: Parameter type: the file of a picture to draw; its suffixes are those of `remat.report.pictures.FORMATS`.
PICTURE_FILE = OutputFile(".svg", ".png")


class ListOf(ParamType):
    """Parameter type for comma-separated values of one type."""

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
