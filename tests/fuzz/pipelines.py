"""Random pipelines that may be run: passes in legal orders, repeated, nested, with other options."""

from __future__ import annotations

from hypothesis import strategies as st

import remat
from remat.plugins import registry
from remat.units import Budget

#: Solvers, the quick ones more often.
SOLVERS = [*["greedy", "dp", "lagrangian", "milp"] * 4, *remat.solver_names()]
BUDGETS = st.one_of(st.sampled_from([0, 0, 0.05, 1]), st.floats(0, 1, width=16))
COSTS = ["unit", "flops", "roofline", "roofline:a100"]
_CUT = ("used-far-apart", "long-fusible-chains", "materialized-backward", "not-in-allowlist", "reductions")  # fmt: skip


@st.composite
def pipelines(draw: st.DrawFn, *, replay: bool = True) -> remat.PassManager:
    """A pipeline that ends in two halves.

    Args:
        replay: with the pass that replays random draws; without it, the verifier must refuse every
            plan that draws twice.
    """
    before = ["dce", "cse", "cleanup-recompute-tags"]
    middle = draw(decisions() if replay else decisions(least=True))
    after = ["reorder-backward", "raise-getitems", "dce"]
    stages = [
        draw(nested(draw(st.lists(st.sampled_from(before), max_size=4)))),
        middle,
        ["partition"],
        draw(nested(draw(st.lists(st.sampled_from(after), max_size=2)))),
        ["functionalize-rng"] if replay else [],
        draw(nested(draw(st.lists(st.sampled_from(after), max_size=3)))),
    ]
    return remat.PassManager.parse(",".join(text for stage in stages for text in stage))


@st.composite
def decisions(draw: st.DrawFn, *, least: bool = False) -> list[str]:
    """How the decision is made: not at all, by a cut, or by a solver under a budget.

    Args:
        least: by a solver that may save nothing but what it must.
    """
    cut = ",".join(f"ban-{name}=false" for name in draw(st.sets(st.sampled_from(_CUT), max_size=3)))
    solved = ["knapsack", "solve-graph"] * 3
    kind = draw(st.sampled_from(solved if least else ["none", "cut", *solved]))
    if kind == "none":
        return []
    made = [f"min-cut({cut})" if cut else "min-cut"] if kind == "cut" or draw(st.booleans()) else []
    if kind != "cut":
        solver = draw(st.sampled_from(_able(kind)))
        budget = 0 if least else draw(BUDGETS)
        cost = draw(st.sampled_from(COSTS))
        made.append(f"{kind}(solver={solver},budget={Budget.parse(budget)},cost={cost})")
    return made


def _able(kind: str) -> list[str]:
    """Solvers of knapsacks, or of whole graphs."""
    known = registry()
    wanted = "knapsack" if kind == "knapsack" else "graph"
    return [s for s in SOLVERS if wanted in known.solver_class(s).solves]


@st.composite
def nested(draw: st.DrawFn, names: list[str]) -> list[str]:
    """The same passes, some of them inside of others."""
    if not names or draw(st.integers(0, 2)) < 2:
        return names
    start = draw(st.integers(0, len(names) - 1))
    end = draw(st.integers(start + 1, len(names)))
    inside = ",".join(draw(nested(names[start:end])))
    limit = draw(st.sampled_from(["", "limit=1,"]))
    return [*names[:start], f"fixpoint({limit}{inside})", *names[end:]]
