"""Plans within the peak of what users write by hand: every block is checkpointed."""

from __future__ import annotations

import re

import torch
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.graph.capture.source import module_path
from tests.architectures import DiffusionTransformer

COST = "roofline:h100"


def test_a_plan_within_the_peak_of_checkpointed_blocks_recomputes_less() -> None:
    """A diffusion transformer in bfloat16, whose blocks compute in float32 what they keep."""
    with torch.device("meta"):
        model = DiffusionTransformer(width=96, layers=2, heads=4).to(torch.bfloat16)
        x, time = torch.zeros(16, 4, 32, 32), torch.zeros(16, 64)
    joint = remat.capture(model, (x.bfloat16(), time.bfloat16()), lower="eager")
    tagged = joint.copy()
    for node in tagged.graph.nodes:
        path = module_path(node) if "nn_module_stack" in node.meta else ""
        block = re.match(r"blocks\.(\d+)", path)
        if node.op == "call_function" and block:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = int(block[1])
    by_hand = remat.plan(tagged, 1, cost=COST)
    plan = remat.plan(joint, remat.Peak(by_hand.peak_bytes), cost=COST)
    assert plan.peak_bytes <= by_hand.peak_bytes
    assert plan.recompute_cost < 0.8 * by_hand.recompute_cost
    assert remat.plan(joint, remat.Peak(0.0), cost=COST).peak_bytes < by_hand.peak_bytes
