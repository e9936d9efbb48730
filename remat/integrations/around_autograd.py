"""A compiled step as autograd meets it: what may happen between forward and backward, and backward twice.

Autograd compares versions of the tensors that a step saves. What a compiled step saves of an output may be
another tensor on the same memory, with a version of its own, which a write to the output leaves as it is.

Inductor's backward overwrites some of what was saved. PyTorch lets it where the first backward does not keep the
graph, and compiles backward only then; ours is compiled before forward runs, when nobody knows that yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from remat import torch_compat
from remat.errors import RereadError


def around_autograd(
    compiled: Callable[..., Any],
    places: Sequence[int],
    name: str,
    *,
    by_inductor: bool,
    reread_inputs: bool,
    count: Callable[[Sequence[Any], Sequence[Any], Any], None] | None = None,
    look: Callable[[Sequence[Any], Any], None] | None = None,
) -> Callable[..., Any]:
    """A compiled step that may be differentiated several times, and refuses once some of its outputs were written to.

    Writes that no version counts, through NumPy or ``.data``, are not noticed.

    Args:
        compiled: the step; it returns a flat list of values.
        places: of those, what backward reads again.
        name: the step, for people.
        by_inductor: whether Inductor compiled it.
        reread_inputs: as its plan has it; what backward reads again in spite of False, eager PyTorch reads, too.
        count: is given the arguments and outputs of each run, and the node of autograd's graph that differentiates it.
        look: called after each run that may be differentiated, with its arguments and its node.
    """
    advice = "Write to a clone of it"
    if reread_inputs:
        advice += ", or say reread_inputs=False: then backward reads neither inputs nor outputs again, and keeps more"
    met: list[type] = []

    def run(*arguments: Any) -> Any:
        outputs = compiled(*arguments)
        if met and not places and count is None and look is None:
            return outputs
        step = next(filter(None, map(_step_of, outputs)), None)
        if step is not None:  # there is something to differentiate
            if not met:
                met.append(type(step))
                _allow_keeping(step, by_inductor=by_inductor)
            _watch(step, outputs, places, name, advice)
            if count is not None:
                count(arguments, outputs, step)
            if look is not None and type(step) is met[0]:
                look(arguments, step)
        return outputs

    return run


def _allow_keeping(step: Any, *, by_inductor: bool) -> None:
    """Has a backward that keeps the graph overwrite copies; halves that run as they are overwrite nothing."""
    owner = torch_compat.autograd_function(step)
    overwritten = list(getattr(getattr(owner, "metadata", None), "bw_donated_idxs", None) or ())
    if owner is None or not overwritten:
        return
    if by_inductor:
        half = getattr(owner, "compiled_bw", None)
        half = torch_compat.innermost_fn(half) if callable(half) else None
        code = getattr(half, "current_callable", None)
        if code is None:
            return

        def run(arguments: list[Any]) -> Any:
            if torch_compat.keeps_graph():
                for k in overwritten:
                    arguments[k] = _copied(arguments[k])
            return code(arguments)

        half.current_callable = run  # type: ignore[union-attr]
    owner.metadata.bw_donated_idxs = []


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the tensor does."""
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def _watch(
    step: Any, outputs: Sequence[Any], places: Sequence[int], name: str, advice: str
) -> None:
    marks = []
    for k in places:
        value = outputs[k]
        if not isinstance(value, torch.Tensor) or value.is_inference():
            continue
        mark = value.detach()  # has the same version, and no memory of its own from here on
        mark.data = value.new_empty(0)
        shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        marks.append((mark, torch_compat.version(mark), f"output {k} of '{name}', {shape},"))
    if marks:
        step.register_prehook(partial(_check, marks, advice))


def _step_of(value: Any) -> Any:
    """The node of autograd's graph at which the step that made a value is differentiated."""
    todo = [getattr(value, "grad_fn", None)]
    for node in islice(iter(todo), 8):  # an output that is a view is taken of what the step returns
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node
        todo += [n for n, _ in getattr(node, "next_functions", ())]
    return None


def _check(marks: Sequence[tuple[torch.Tensor, int, str]], advice: str, _: Any) -> None:
    for mark, version, told in marks:
        if torch_compat.version(mark) != version:
            raise RereadError(
                f"{told} was written to between forward and backward, which reads it again; expected it "
                f"as it was returned. {advice}"
            )
