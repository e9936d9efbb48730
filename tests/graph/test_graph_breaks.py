"""Where models break into graphs: the reason and the user's line."""

from __future__ import annotations

import logging

import pytest
import torch

from remat.errors import CaptureError
from remat.graph.capture import capture
from remat.graph.graph_breaks import graph_breaks


def asked(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos().sum()


def branches(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.sum() > 0:
        y = y.cos()
    return y.sum()


LOG = logging.getLogger(__name__)


def logs(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    LOG.warning("so far")
    return y.cos().sum()


X = (torch.ones(4, requires_grad=True),)


def test_each_break_has_its_line_and_its_reason() -> None:
    found = graph_breaks(asked, X)
    assert found.graphs == 2
    (one,) = found.breaks
    assert one.source.startswith(__file__)
    assert one.source.endswith(f":{asked.__code__.co_firstlineno + 2} torch._dynamo.graph_break()")
    assert "graph_break" in one.reason
    assert "\n" not in one.reason
    assert found.summary == "2 graphs, 1 graph break"


def test_what_a_model_logs_breaks_torch_compile_and_not_the_capture() -> None:
    found = graph_breaks(logs, X)
    assert found.graphs == 2
    (one,) = found.breaks
    assert one.source.endswith('.warning("so far")')
    assert "torch._dynamo.config.ignore_logging_functions" in one.hint
    assert len(capture(logs, X, fullgraph=False)) == 1


class LogsInAProperty(torch.nn.Module):
    """Its graph ends before the property is read, so Dynamo's reason is not that the property logs."""

    @property
    def scale(self) -> float:
        LOG.warning("so far")
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos().sin()
        z = y * self.scale
        return z.cos().sum()


def test_the_cause_of_a_break_is_given_if_the_graph_ends_earlier() -> None:
    found = graph_breaks(LogsInAProperty(), X)
    (one,) = found.breaks
    assert one.source.endswith("z = y * self.scale")
    assert "logging.Logger" in one.reason
    assert ".warning" in one.reason
    assert "torch._dynamo.config.ignore_logging_functions" in one.hint


def test_a_whole_model_has_none() -> None:
    found = graph_breaks(torch.nn.Linear(4, 2), (torch.ones(1, 4),))
    assert (found.graphs, found.breaks, found.summary) == (1, (), "1 graph, no graph break")


def test_branches_on_numbers_are_found_by_a_run() -> None:
    with pytest.raises(CaptureError, match="decides by the numbers") as caught:
        graph_breaks(branches, X)
    assert "run=True" in caught.value.remedies
    (one,) = graph_breaks(branches, X, run=True).breaks
    assert "depends on the numbers" in one.reason
    assert one.source.endswith("if y.sum() > 0:")


def test_nothing_is_left_behind() -> None:
    model = torch.nn.Linear(4, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    graph_breaks(model, (torch.ones(1, 4),), run=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
