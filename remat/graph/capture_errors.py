"""What went wrong in a capture, as one message with the user's line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from remat.errors import CaptureError
from remat.graph.joint import JointGraph


class CapturedError(Exception):
    """Ends a compilation once its joint graph is known."""


class NothingToDifferentiateError(Exception):
    """AOTAutograd asked for an inference graph."""


def explain(
    error: Exception, name: str, sink: list[JointGraph], fullgraph: bool, not_callable: str
) -> None:
    """Turns what came out of a compilation into one message, or into nothing if it was the end."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (CapturedError, NothingToDifferentiateError)):
            return
        if isinstance(cause, CaptureError):
            raise cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    if fullgraph and sink:
        return
    if not_callable and not sink:
        raise CaptureError(f"'{name}' cannot be called like that: {not_callable}") from error
    text = str(error).strip()
    where = _user_line(text)
    if _asks_for_numbers(error):
        raise CaptureError(
            f"'{name}' decides by the numbers in a tensor{where or _raised_at(error)}, and fake tensors have none: "
            f"{text.splitlines()[0][:200].rstrip('.')}",
            "Pass fullgraph=False and run=True with real tensors, which takes the branches from a run, or "
            "decide without numbers (torch.where, torch.cond)",
            ("fullgraph=False", "run=True"),
        ) from error
    raised = re.search(r"Developer debug context: raised exception (.+)", text)
    if raised is not None:
        raise CaptureError(
            f"'{name}' raised {raised.group(1).strip()[:400]}{where} while it was traced"
        ) from error
    first = re.split(r"\n\s*\n|\nfrom user code", text)[0].strip()
    first = " ".join(line.strip() for line in first.splitlines())
    if type(error).__name__ in ("Unsupported", "UserError", "FailOnRecompileLimitHit"):
        raise CaptureError(
            f"'{name}' cannot be captured as one graph{where}: {first[:600].rstrip('.')}",
            "Remove the graph break, or pass fullgraph=False for a list of graphs",
            ("fullgraph=False",),
        ) from error
    raise CaptureError(
        f"'{name}' failed while it was traced{where}: {type(error).__name__}: {first[:600]}"
    ) from error


def takes_lock(error: Exception) -> bool:
    """Whether a trace as one graph ended because the code takes a lock of `threading`."""
    if type(error).__name__ != "Unsupported":
        return False
    return re.search(r"enter a `R?[lL]ock` context manager", str(error)) is not None


def _asks_for_numbers(error: BaseException | None) -> bool:
    """Whether a trace ended because the value of a tensor was asked for."""
    while error is not None:
        if type(error).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def _raised_at(error: BaseException) -> str:
    """The innermost line outside of PyTorch and of this folder that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    found = [f for f in frames if not f.filename.startswith((*ours, "<"))]
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""


def _user_line(text: str) -> str:
    """The innermost line that Dynamo names, as `` at file:line``: of the user's, where PyTorch's follow."""
    tail = text.split("from user code:")[-1] if "from user code:" in text else ""
    found = re.findall(r'File "([^"]+)", line (\d+)', tail)
    theirs = str(Path(torch.__file__).parent)
    own = [place for place in found if not place[0].startswith((theirs, "<"))]
    place = (own or found or [None])[-1]
    return "" if place is None else f" at {place[0]}:{place[1]}"
