"""The greedy order of one module: what to recompute first (SPEC C)."""

from __future__ import annotations

import math

from remat.sac.estimate.stats import MSPS, PS_PER_MS, SACGreedyOrderMeta, SACStats, group


def greedy_order(stats: SACStats) -> SACGreedyOrderMeta:
    """Orders the candidates of a module by the bytes that recomputing frees per time.

    Views are always recomputed. What is decided together is one candidate; what recomputing takes
    no time comes first, then the most bytes per time; equals in the order in which they ran.
    """
    grouping = group(stats)
    written = {i for pair in stats.inplace_ops for i in pair}
    drawn = set(stats.rand_ops)
    candidates = [
        MSPS(
            func_names={stats.func_names[i] for i in item.ops},
            op_idx=item.ops[0],
            memory=item.nbytes,
            runtime=item.runtime_ps / PS_PER_MS,
            msps=item.nbytes * PS_PER_MS / item.runtime_ps if item.runtime_ps else math.inf,
        )
        for item in grouping.free
    ]
    items = (*grouping.free, *grouping.stored)
    return SACGreedyOrderMeta(
        recomputed_ops=set(grouping.recomputed),
        stored_ops={item.ops[0] for item in grouping.stored},
        inplace_op_groups={
            item.ops[0]: set(item.ops) for item in items if written.intersection(item.ops)
        },
        random_ops_group={
            item.ops[0]: set(item.ops) for item in items if drawn.intersection(item.ops)
        },
        msps_meta=sorted(candidates, key=lambda c: (-c.msps, c.op_idx)),
    )
