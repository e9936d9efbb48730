"""Wrap a compiled step, to check the sizes of each run, and to detect writes to the outputs.

Autograd detects a write to a saved tensor by the tensor's version counter. A compiled step may save a second tensor
that shares the memory of an output. The second tensor has its own version, which a write to the output does not change.
This module therefore checks the version of the output itself, just before backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from remat import torch_compat
from remat.errors import RereadError
from remat.integrations.step_guards import Look
from remat.integrations.step_tally import CountRun
from remat.integrations.workarounds import allow_keeping_the_graph
from remat.planning.plan import Plan


def wrap_step(
    compiled: Callable[..., Any],
    plan: Plan,
    *,
    by_inductor: bool,
    count: CountRun | None,
    look: Look | None,
) -> Callable[..., Any]:
    """Wrap a compiled step to allow ``retain_graph=True``, and to detect writes to its outputs.

    If the user writes to an output after forward, and backward reads that output, backward raises a
    `RereadError`. Writes through NumPy or ``.data`` do not change a tensor's version, so such
    writes are not detected. The callbacks ``count`` and ``look`` are called after each run of the step.

    Args:
        compiled: the compiled step, which returns a flat list of values.
        plan: the plan of the step.
        by_inductor: whether Inductor compiled the step.
        count: called after each run that has a backward, with the run's arguments, the run's
            outputs, and the node of autograd's graph that runs backward. None: nothing is called.
        look: called after each run that has a backward, with the run's arguments and the node of
            autograd's graph that runs backward. None: nothing is called.

    Returns:
        The wrapped step.
    """
    # The wrapped step must not keep the plan's modules alive, so it has no reference to the plan.
    places, name = plan.reread_outputs, plan.graph
    advice = "Write to a clone of it"
    if plan.reread_inputs:
        advice += ", or say reread_inputs=False: then backward reads neither inputs nor outputs again, and keeps more"
    kinds: list[type] = []

    def run(*arguments: Any) -> Any:
        if kinds and not places and count is None and look is None:
            return compiled(*arguments)
        # Nodes are collected before the run, because a step that writes to an argument replaces the argument's node.
        earlier = {a.grad_fn for a in arguments if isinstance(a, torch.Tensor)}
        outputs = compiled(*arguments)
        node = next(filter(None, (_backward_node(value, earlier) for value in outputs)), None)
        if node is not None:  # there is something to differentiate
            if not kinds:
                kinds.append(type(node))
                allow_keeping_the_graph(node, by_inductor=by_inductor)
            _watch(node, outputs, places, name, advice)
            if count is not None:
                count(arguments, outputs, node)
            if look is not None and type(node) is kinds[0]:
                look(arguments, node)
        return outputs

    return run


def _watch(
    node: Any, outputs: Sequence[Any], places: Sequence[int], name: str, advice: str
) -> None:
    """Record the version counters of the outputs that backward reads, and check them just before backward."""
    marks = []
    for k in places:
        value = outputs[k]
        # Inference tensors have no version.
        if not isinstance(value, torch.Tensor) or value.is_inference():
            continue
        mark = value.detach()  # shares the version counter; the next line releases its memory
        mark.data = value.new_empty(0)
        shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        marks.append((mark, torch_compat.version(mark), f"output {k} of '{name}', {shape},"))
    if marks:
        node.register_prehook(partial(_check, marks, advice))


def _backward_node(value: Any, earlier: Collection[Any]) -> Any:
    """Return the node of autograd's graph that runs the backward of a compiled step."""
    todo = [getattr(value, "grad_fn", None)]
    # If an output is a view of a returned value, view nodes come before the step's node.
    for node in islice(iter(todo), 8):
        if node in earlier:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node
        todo += [n for n, _ in getattr(node, "next_functions", ())]
    return None


def _check(marks: Sequence[tuple[torch.Tensor, int, str]], advice: str, _: Any) -> None:
    """Raise an error if an output was written to since `_watch` recorded its version."""
    for mark, version, name in marks:
        if torch_compat.version(mark) != version:
            raise RereadError(
                f"{name} was written to between forward and backward, which reads it again; expected it "
                f"as it was returned. {advice}"
            )
