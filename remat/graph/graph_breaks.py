"""Where a model breaks into several graphs: each break with its reason and the user's line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remat import torch_compat
from remat.errors import CaptureError
from remat.graph.calling import read_call, why_no_instance, why_not_callable
from remat.graph.capture_errors import explain
from remat.graph.fakes_of_models import as_fakes

#: How Dynamo calls a break at what a model logs, and what makes it go on.
_LOGS = "logging.Logger method not supported"
_PAST_LOGGING = (
    "To go past it: torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning), or another "
    "method of it that is called there, before the model is compiled"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """One place where a graph ends and another begins.

    Attributes:
        source: the user's line, ``file.py:7 y = x.item()``; empty where unknown.
        reason: why Dynamo ends the graph there.
        captured: whether `remat.capture` has the break too; it goes past what a model logs.
    """

    source: str
    reason: str
    captured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreaks:
    """The graphs of a model under ``torch.compile``.

    Attributes:
        graphs: how many there are.
        breaks: where one ends, each place once, in the order in which they are met.
    """

    graphs: int
    breaks: tuple[GraphBreak, ...]

    @property
    def summary(self) -> str:
        """How many there are, in words."""
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        if not self.breaks:
            return f"{graphs}, no graph break"
        places = "1 graph break" if len(self.breaks) == 1 else f"{len(self.breaks)} graph breaks"
        only = sum(not b.captured for b in self.breaks)
        ours = f", {only} of them under torch.compile only: remat's capture goes past logging"
        return f"{graphs}, {places}{ours if only else ''}"


def graph_breaks(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    run: bool = False,
) -> GraphBreaks:
    """Lists where ``model(*args, **kwargs)`` breaks into graphs, as ``torch._dynamo.explain`` finds them.

    Args:
        model: a module or a function, as in `remat.capture`; no weight is copied or allocated.
        args: positional arguments.
        kwargs: keyword arguments.
        device: as in `remat.capture`.
        run: as in `remat.capture`: run forward on real numbers, for branches that depend on them.

    Raises:
        CaptureError: as from `remat.capture` with ``fullgraph=False``.
    """
    if no_instance := why_no_instance(model):
        raise CaptureError(no_instance)
    args, kwargs = read_call(args, kwargs)
    name = getattr(model, "__name__", type(model).__name__)
    faked = as_fakes(
        model, args, kwargs, fullgraph=False, device=device, run=run, past_logging=False
    )
    with faked as (fake_model, fake_args, fake_kwargs):
        try:
            told = torch_compat.explain(fake_model)(*fake_args, **fake_kwargs)
        except Exception as error:
            explain(error, name, [], False, why_not_callable(model, args, kwargs))
            raise
    found = [_break(reason) for reason in told.break_reasons if reason.graph_break]
    return GraphBreaks(graphs=told.graph_count, breaks=tuple(dict.fromkeys(found)))


def _break(reason: Any) -> GraphBreak:
    text = str(reason.reason)
    first = text.split("\n\n")[0]
    logs = first.startswith(_LOGS)
    told = _explained(text, first)
    return GraphBreak(
        source=_source(reason.user_stack),
        reason=f"{told}. {_PAST_LOGGING}" if logs else told,
        captured=not logs,
    )


def _explained(text: str, first: str) -> str:
    """The reason in one line: what Dynamo calls it, and its explanation."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")]
    if text.startswith("generic_jump"):
        return f"a branch that depends on the numbers in a tensor ({text.splitlines()[0]})"
    head = " ".join(first.splitlines()[0].split()) if first else "no reason is given"
    return f"{head}: {told[0].rstrip('.')}" if told else head


def _source(stack: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line outside of PyTorch, with its text."""
    theirs = str(Path(torch.__file__).parent)
    frames = list(stack)
    own = [f for f in frames if not f.filename.startswith((theirs, "<"))]
    if not (own or frames):
        return ""
    frame = (own or frames)[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0)
    return f"{frame.filename}:{frame.lineno} {line.strip()}".rstrip()
