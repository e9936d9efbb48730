"""Split the final linear layer and the loss of a language model along the dimension of the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from remat.errors import ProblemError
from remat.graph.capture.fake import refresh
from remat.graph.capture.tokens import operators, shape_of
from remat.graph.memory.storages import fake_mode_of
from remat.passes.core import pipeline_text
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State
from remat.passes.joint.chunk_region import ALSO, Region, find_logits, refused
from remat.passes.joint.chunk_rewrite import NOT_OF_SLICES, Split

_aten = torch.ops.aten


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Split the final linear layer and the loss of a language model into chunks of tokens.

    The logits are often the largest values of a step. After the pass, the step computes the logits
    chunk by chunk, and only the values of one chunk need to be alive together. Gradients of the hidden
    states are concatenated over the chunks. Gradients of the weight and the bias are summed over the
    chunks, so these gradients may differ by rounding from the gradients without the pass.

    Attributes:
        chunks: number of chunks. The last chunk may be shorter. 1: leave the step unchanged.
        in_forward: whether forward may also compute the gradients of each chunk, before the gradient of
            the loss is known. Forward's gradients are later multiplied by the gradient of the loss. If
            False, or if forward cannot compute gradients, backward computes the gradients chunk by
            chunk, and a plan may recompute the logits of each chunk.
    """

    chunks: int = 8
    in_forward: bool = True

    name: ClassVar[str] = "chunk-loss"
    stage: ClassVar[Stage] = Stage.JOINT
    keeps_numbers: ClassVar[bool] = False
    not_after: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("min-cut", "knapsack", "solve-graph", "partition"),
        "its decision would name values that chunk-loss removes",
    )

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 1:
            raise ProblemError(f"chunks is {self.chunks!r}; expected a number of chunks, 1 or more")

    def run(self, state: State) -> PassResult:
        """Split the loss in the state's joint graph, and return the result.

        Raises:
            PlanError: the loss cannot be split; the message names the call that prevents it.
        """
        if self.chunks == 1:
            return PassResult(state=state, modified=False)
        graph, losses = state.joint.graph, 0
        with state.edit() as edit:
            _split_nll(graph)
            least = 0
            while (logits := find_logits(graph, least)) is not None:
                least = least or math.prod(shape_of(logits)) // ALSO
                region = Region(graph, logits, state.joint.num_fwd_outputs)
                Split(region, self.chunks, in_forward=self.in_forward).run()
                losses += 1
            graph.lint()
            result = edit.result(f"{losses} losses in {self.chunks} chunks", losses=losses)
        # A plan records the number of chunks even if it is the default, because the default may change.
        chunk = f"{self.name}(chunks={self.chunks}{'' if self.in_forward else ',in-forward=false'})"
        return replace(result, state=replace(result.state, chunk=chunk))


def read_chunk(text: str) -> ChunkLoss | None:
    """Return the `ChunkLoss` pass that a plan has recorded as text; None for empty text."""
    if not text:
        return None
    (parsed,) = pipeline_text.read_pipeline(text, passes={ChunkLoss.name: ChunkLoss}, readers={})
    assert isinstance(parsed, ChunkLoss)
    return parsed


def _split_nll(graph: fx.Graph) -> None:
    """Replace each ``nll_loss_forward`` by calls that compute each token's loss, and the sum or mean of the losses."""
    for node in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        base, target, weight, reduction, ignored = node.args
        if weight is not None:
            raise refused(
                f"'{node.name}' has class weights; the lowering \"inductor\" can split it"
            )
        value = base.meta["val"]

        def call(name: str, *args: Any, **kwargs: Any) -> fx.Node:
            inserted: fx.Node = graph.call_function(operators(name)[0], args, kwargs)
            inserted.meta = {k: v for k, v in node.meta.items() if k not in NOT_OF_SLICES}  # noqa: B023
            refresh(inserted, fake_mode_of(value))  # noqa: B023
            return inserted

        with graph.inserting_before(node):
            zeros = [
                call("full", [], 0, dtype=kind, device=value.device, pin_memory=False)
                for kind in (torch.int64, value.dtype)
            ]
            counts = call("ne.Scalar", target, ignored)
            labels = call("unsqueeze", call("where.self", counts, target, zeros[0]), -1)
            picked = call("squeeze.dim", call("gather", base, -1, labels), -1)
            loss = call("where.self", counts, call("neg", picked), zeros[1])
            total = call("_to_copy", call("sum", counts), dtype=value.dtype)
            if reduction:
                loss = call("sum", loss)
            if reduction == 1:
                loss = call("div.Tensor", loss, total)
        for user in list(node.users):
            user.replace_all_uses_with((loss, total)[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
