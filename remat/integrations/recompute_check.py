"""Compare recomputed values with forward's values at run time, under the option ``check="recomputed"``.

Forward also saves each value that backward computes again, and backward compares the saved value with the recomputed
one. A checked step therefore saves at least as many bytes as the step at budget 1. Under Inductor, the compared values
are written to memory, so that kernels may fuse, and round, differently from kernels without the check.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from remat.errors import RecomputeError
from remat.graph.branch_values import branches_of_forward
from remat.graph.capture.source import located
from remat.graph.joint import output_node, outputs_of
from remat.graph.memory.storages import Sizes, fake_mode_of, storage_key
from remat.passes.split.convention import hand_over, own_descriptors, write_output

_LOG = logging.getLogger(__name__)


@torch.library.custom_op("remat::compare_again", mutates_args=())
def compare_again(
    again: torch.Tensor, first: torch.Tensor, description: str, branch: bool
) -> torch.Tensor:
    """Compare a recomputed value, bit for bit, with the value that forward computed.

    Args:
        again: the value as backward computed it.
        first: the value as forward computed it.
        description: describes the value in messages: node, operator and source line.
        branch: whether the value is a branch value.

    Returns:
        The largest difference; infinity if only one of two compared elements is a number.

    Raises:
        RecomputeError: a branch value differs.
    """
    differs = (again != first) & ~((again != again) & (first != first))
    if not differs.any():
        return torch.zeros((), dtype=torch.float64)
    count, of = int(differs.sum()), differs.numel()
    if branch:
        raise RecomputeError(
            f"{count} of {of} elements of a branch value differ between forward and backward; expected none: "
            f"{description}\nBackward differentiates another function than forward computed. Please report this"
        )
    wide = torch.complex128 if again.is_complex() else torch.float64
    off = (again.to(wide) - first.to(wide)).abs()[differs].nan_to_num(nan=torch.inf).max()
    return off.to("cpu", torch.float64)


@torch.library.custom_op("remat::report_again", mutates_args=())
def report_again(gradient: torch.Tensor, seen: list[torch.Tensor], names: str) -> torch.Tensor:
    """Log how far recomputed values differ from forward's values, and return a copy of ``gradient``.

    Args:
        gradient: a gradient that backward returns, so that no compiler removes the comparisons.
        seen: results of `compare_again`.
        names: text that describes the compared values, one value in each line.
    """
    differences = [
        (float(off), description) for off, description in zip(seen, names.split("\n"), strict=True)
    ]
    differing = sorted((pair for pair in differences if pair[0]), reverse=True)
    for off, description in differing:
        _LOG.warning("recomputed otherwise than in forward, by up to %.3g: %s", off, description)
    # A warning is shown without any logging set up, so that the user sees that the check ran.
    if not differing:
        _LOG.warning("all %d recomputed values are forward's, bit for bit", len(differences))
    else:
        _LOG.warning(
            "%d of %d recomputed values are forward's, bit for bit; the others differ by the absolute numbers above. "
            "No branch value differs: that would be an error",
            len(differences) - len(differing),
            len(differences),
        )
    return gradient.clone()


@compare_again.register_fake
def _(again: torch.Tensor, first: torch.Tensor, description: str, branch: bool) -> torch.Tensor:
    return torch.empty((), dtype=torch.float64)


@report_again.register_fake
def _(gradient: torch.Tensor, seen: list[torch.Tensor], names: str) -> torch.Tensor:
    return torch.empty_like(gradient)


def add_checks(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Change forward and backward in place, so that backward compares each recomputed value with forward's value.

    Recomputed values without memory of their own, such as views, are not compared.
    """
    values = outputs_of(forward.graph)
    calls = {n.name: n for n in forward.graph.nodes if n.op == "call_function"}
    inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
    taken = {*Sizes().of_all([n for n in (*inputs, *values) if isinstance(n, fx.Node)])}
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for node in backward.graph.nodes:
        first = calls.get(node.name) if node.op == "call_function" else None
        key = None if first is None else storage_key(first.meta.get("val"))
        if first is not None and key is not None and key not in taken:
            taken.add(key)
            pairs.append((node, first))
    gradients = outputs_of(backward.graph)
    at = next((k for k, g in enumerate(gradients) if isinstance(g, fx.Node)), None)
    if not pairs or at is None:
        return
    firsts = [first for _, first in pairs]
    given = hand_over(forward.graph, backward.graph, num_fwd_outputs, firsts, suffix="_first")
    branches = branches_of_forward(forward)
    seen, texts = [], []
    for (again, first), saved in zip(pairs, given, strict=True):
        texts.append(located(first).replace("\n", " "))
        arguments = (again, saved, texts[-1], first in branches)
        with backward.graph.inserting_after(again):
            seen.append(_call(backward.graph, torch.ops.remat.compare_again.default, arguments))
    last = output_node(backward.graph)
    with backward.graph.inserting_before(last):
        arguments = (gradients[at], seen, "\n".join(texts))  # type: ignore[assignment]
        gradients[at] = _call(backward.graph, torch.ops.remat.report_again.default, arguments)
    write_output(last, gradients, own_descriptors(last, len(gradients)))
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _call(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """Add to a graph a node that calls an operator, with the fake value of the result."""
    node = graph.call_function(target, arguments)
    fakes = fx.node.map_arg(arguments, lambda n: n.meta["val"])
    mode: Any = fake_mode_of(fakes)
    with mode:
        node.meta["val"] = target(*fakes)
    return node
