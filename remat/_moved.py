"""Where modules were before, for the programs that import them from there."""

from __future__ import annotations

import importlib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Modules that kept their names: the package before, the package now, and which.
_SAME_NAME = (
    ("remat.plugins", "remat.solvers", "isolation"),
    ("remat.graph", "remat.running", "random_values differences measure"),
    (
        "remat.passes",
        "remat.passes.core",
        "base analyses control pipeline_text",
    ),
    (
        "remat.passes",
        "remat.passes.joint",
        "dce cse cleanup_recompute_tags classify dist_from_backward",
    ),
    (
        "remat.passes",
        "remat.passes.decide",
        "min_cut bans budgeted knapsack solve_graph least_causes",
    ),
    (
        "remat.passes",
        "remat.passes.split",
        "partition extraction functionalize_rng reorder_backward raise_getitems",
    ),
    ("remat.passes", "remat.passes.hooks", "saved_tensor_hooks"),
    ("remat.passes", "remat.passes.ranks", "agree_ranks"),
    ("remat", "remat.planning", "pipelines comparison"),
    ("remat.graph", "remat.report", "explanation"),
    ("remat", "remat.integrations", "torch_knapsack kept_steps"),
    ("remat.sac", "remat.sac.estimate", "modules"),
    ("remat.sac", "remat.sac.solve", "peaks"),
)
#: Where a module was, and where it is.
MOVED = {
    **{f"{old}.{n}": f"{new}.{n}" for old, new, names in _SAME_NAME for n in names.split()},
    "remat.graph.budget": "remat.units",
    "remat.solvers.peeling": "remat.solvers.reduction",
    "remat.solvers.covers": "remat.solvers.cover_cuts",
    "remat.solvers.doubles": "remat.solvers.cover_cuts",
    "remat.solvers.quiet": "remat.solvers.highs",
    "remat.plugins.worker": "remat.solvers.isolation_worker",
    "remat.graph.stamp": "remat.graph.snapshot",
    "remat.graph.outline": "remat.graph.rank_fingerprint",
    "remat.graph.memories": "remat.graph.storages",
    "remat.graph.sizes": "remat.graph.storages",
    "remat.graph.lifetimes": "remat.graph.liveness",
    **{f"remat.graph.text.{n}": "remat.graph.text.graphs" for n in ("parser", "printer")},
    **{f"remat.graph.text.value_{n}": "remat.graph.text.values" for n in ("reader", "writer")},
    **{f"remat.graph.text.{n}": "remat.graph.text.annotations" for n in ("marks", "descriptors")},
    "remat.graph.text.opaque": "remat.graph.text.literals",
    "remat.graph.costs.nested": "remat.graph.costs.base",
    "remat.graph.costs.lock": "remat.graph.costs.store",
    "remat.graph.running": "remat.running.trial",
    "remat.passes.analysis": "remat.passes.core.state",
    "remat.passes.instrument": "remat.passes.core.pipeline",
    "remat.passes.pipeline_syntax": "remat.passes.core.pipeline_text",
    "remat.passes.manager": "remat.planning.pipelines",
    "remat.passes.eager_hooks": "remat.passes.packing.eager",
    "remat.passes.hook_inlining": "remat.passes.hooks.inlining",
    "remat.passes.hook_tracing": "remat.passes.hooks.tracing",
    "remat.passes.instruments.unexpected": "remat.passes.instruments.crash_reports",
    "remat.mismatch": "remat.planning.saved_plans",
    "remat.saved_plans": "remat.planning.saved_plans",
    "remat.integrations.saved_plans": "remat.planning.saved_plans",
    "remat.together": "remat.planning.plan_set",
    "remat.graph.drawing": "remat.report.memory_plot",
    "remat.graph.frontier_drawing": "remat.report.frontier_plot",
    "remat.partitioning": "remat.integrations.partitioner",
    "remat.compile": "remat.integrations.torch_compile",
    "remat.checkpointing": "remat.sac.api.checkpointing",
}


class OldPaths(MetaPathFinder, Loader):
    """Imports a module by where it was before: the very module, under both names."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Puts back what the import has just set: a module knows itself by where it is now."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
