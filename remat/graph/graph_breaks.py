"""List the graph breaks of a model, each with its reason and the user's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat import torch_compat
from remat.errors import CaptureError
from remat.graph.calling import read_call, why_no_instance, why_not_callable
from remat.graph.capture_errors import explain
from remat.graph.fakes_of_models import as_fakes
from remat.graph.source import user_frame

#: Dynamo's text about a graph that ends before the statement that Dynamo cannot trace.
_NO_CAUSE = "step_unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A place where one graph ends and another begins.

    Attributes:
        source: the user's line, ``file.py:7 y = x.item()``; empty if unknown.
        reason: Dynamo's reason for ending the graph.
        hint: Dynamo's advice; empty if it gives none.
    """

    source: str
    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreaks:
    """The graphs and graph breaks of a model under ``torch.compile``.

    Attributes:
        graphs: number of graphs.
        breaks: distinct graph breaks in the order of their occurrence.
    """

    graphs: int
    breaks: tuple[GraphBreak, ...]

    @property
    def summary(self) -> str:
        """Number of graphs and graph breaks in words, such as ``2 graphs, 1 graph break``."""
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        if not self.breaks:
            return f"{graphs}, no graph break"
        places = "1 graph break" if len(self.breaks) == 1 else f"{len(self.breaks)} graph breaks"
        return f"{graphs}, {places}"


def graph_breaks(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    run: bool = False,
) -> GraphBreaks:
    """List the graph breaks of ``model(*args, **kwargs)``, as ``torch._dynamo.explain`` finds them.

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
    counted = torch_compat.counters["graph_break"].copy()
    with faked as (fake_model, fake_args, fake_kwargs):
        try:
            explained = torch_compat.explain(fake_model)(*fake_args, **fake_kwargs)
        except Exception as error:
            explain(error, name, [], False, why_not_callable(model, args, kwargs))
            raise
    causes = list(torch_compat.counters["graph_break"] - counted)
    reasons = [reason for reason in explained.break_reasons if reason.graph_break]
    breaks = list(map(_break, reasons, _texts([str(r.reason) for r in reasons], causes)))
    return GraphBreaks(graphs=explained.graph_count, breaks=tuple(dict.fromkeys(breaks)))


def _texts(texts: list[str], causes: list[str]) -> list[str]:
    """Return the texts about graph breaks, with a text that states no cause replaced by the cause.

    Such a text results if a graph ends before the statement that Dynamo cannot trace. If it is
    unclear which cause belongs to which text, all texts stay unchanged.

    Args:
        texts: Dynamo's text about each graph break.
        causes: the texts about statements that Dynamo could not trace.
    """
    others = [cause for cause in causes if cause not in texts]
    unknown = [k for k, text in enumerate(texts) if text == _NO_CAUSE]
    if len(others) != len(unknown):
        return texts  # it is not known which cause belongs to which graph break
    found = dict(zip(unknown, others, strict=True))
    return [found.get(k, text) for k, text in enumerate(texts)]


def _break(reason: Any, text: str) -> GraphBreak:
    """Parse Dynamo's text about a graph break.

    The text is a headline, followed by explanations and hints on lines of their own.
    """
    lines = [line.strip() for line in text.splitlines()] or [""]
    explanations, hints, context = (
        [line.removeprefix(head).strip() for line in lines if line.startswith(head)]
        for head in ("Explanation:", "Hint:", "Developer debug context:")
    )
    if reason.reason != _NO_CAUSE:
        context = []  # the line in `source` shows the statement
    headline = " ".join(lines[0].split()) or "no reason is given"
    # Dynamo's internal name for a branch on a tensor's value.
    if headline.startswith("generic_jump"):
        headline = f"a branch that depends on the numbers in a tensor ({headline})"
    frame = user_frame(reversed(reason.user_stack))
    return GraphBreak(
        source="" if frame is None else f"{frame.filename}:{frame.lineno} {frame.line}".rstrip(),
        reason=": ".join(
            [headline, *(text.rstrip(".") for text in (explanations[:1] + context[:1]))]
        ),
        hint=" ".join(hints),
    )
