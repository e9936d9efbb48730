"""The parsed options of a partitioner or a backend, with the cache keys that depend on them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Unpack

from remat import torch_compat
from remat.arguments import passes_on
from remat.errors import LastWarning, ProblemError
from remat.graph.memory.storages import planned_sizes
from remat.options import PlanOptions, PlanOptionsDict
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.passes.instruments.reproducer import folder_for
from remat.passes.packing.pairs import SavedTensorHooks, register
from remat.passes.ranks.agree_ranks import WAIT_S, AgreeRanks
from remat.passes.ranks.protocol import other_ranks
from remat.planning.plan import Plan
from remat.planning.plan_set import PlanSet
from remat.planning.request import PlanRequest
from remat.plugins.identity import described, is_known_elsewhere, surroundings
from remat.version import __version__

#: Attributes that do not affect plans, or that enter a cache key in another way.
_DECIDES_NOTHING = frozenset(("request", "agree", "repro", "graphs"))


@dataclass(slots=True)
class CompiledGraphs:
    """Record of the graphs that were partitioned with the same `PartitionOptions`.

    Attributes:
        planned: identities of the graphs that were planned under the budget. An identity is the
            result of `code_of` or, if Dynamo is not compiling, the graph's fingerprint (a digest of
            its structure).
        latest: plan of the newest call of a `Partitioner`, whose modules live as long as this object. None for
            compilations by a backend, whose compiled steps hold their plans.
        partitioned: dict from a fingerprint to the number of graphs with this fingerprint that were
            partitioned so far. Equal layers share a fingerprint, and each layer takes the next
            saved plan of this fingerprint.
        matched: patterns of the option ``policies`` that matched a module in any of the graphs.
        has_breaks: whether the step has graph breaks. A pattern that matches no module in one graph
            may then match a module in another graph.
        host_bytes: dict from the identity of each graph to the bytes that the graph offloads.
        from_caches: whether compiled steps may come from a cache, which has no graph that could be planned again.
        replanned: how often the graphs of a step were planned together after a run.
        last_warnings: dict from the identity of each graph to the bytes that warnings about the graph named.
    """

    planned: set[str] = field(default_factory=set)
    latest: Plan | None = None
    partitioned: Counter[str] = field(default_factory=Counter)
    matched: set[str] = field(default_factory=set)
    has_breaks: bool = False
    host_bytes: dict[str, int] = field(default_factory=dict)
    from_caches: bool = True
    replanned: int = 0
    last_warnings: defaultdict[str, LastWarning] = field(
        default_factory=lambda: defaultdict(LastWarning)
    )


class PartitionOptions:
    """Options of a partitioner or a backend, and the record of the graphs that were partitioned under these options.

    Attributes:
        request: the parsed options of planning.
        hooks_key: text that identifies the saved-tensor hooks.
        lower: the lowering of the graphs, ``"inductor"`` or ``"eager"``.
        agree: the pass by which the ranks of a job agree on a decision; None if every rank decides
            alone.
        repro: the folder for reproducers of planning errors; None for no reproducers.
        strict: whether a budget in bytes that cannot be met raises an error at every compilation.
        exact_branches: whether Inductor rounds every 16-bit result of a graph that branches on a
            16-bit value.
        check: ``"recomputed"`` if backward compares recomputed values with forward's values; else
            None.
        graphs: record of the graphs that were partitioned.
    """

    @passes_on(PlanOptionsDict.__annotations__, PlanOptions)
    def __init__(
        self,
        *,
        lower: str = "eager",
        rank_wait_s: float | None = WAIT_S,
        repro: str | Path | bool | None = None,
        strict: bool = False,
        exact_branches: bool = True,
        check: str | None = None,
        **options: Unpack[PlanOptionsDict],
    ) -> None:
        """Parse and check the options of a partitioner or a backend.

        Args:
            lower: the lowering of the graphs, ``"inductor"`` or ``"eager"``.
            rank_wait_s: seconds that the other ranks of a job wait for the decision of rank 0. None:
                every rank decides alone.
            repro: the folder for a reproducer of an unexpected planning error. None: the folder that
                the environment variable ``REMAT_REPRO_DIR`` names, else a temporary folder. False: no
                reproducer.
            strict: whether a recompilation raises an error if a budget in bytes cannot be met, as the
                first compilation does. By default a recompilation warns instead, and the step runs
                under the plan with the least peak. Under a `remat.Saved` budget, the step then runs
                under the plan with the fewest saved bytes.
            exact_branches: whether Inductor rounds every 16-bit result as eager PyTorch does, in graphs
                that branch on such results, as a router of experts does. From PyTorch 2.15 on,
                Inductor then rounds numbers in the code too. If False, the numbers of forward, and
                hence its branches, may depend on the budget. Backward takes forward's branches in
                any case.
            check: ``"recomputed"``, for debugging: forward also saves each value that backward computes
                again, and backward compares the two bit for bit. A branch value that differs raises a
                `remat.errors.RecomputeError`; other differences are logged. The budget is not met.
            options: options of `remat.options.PlanOptions`.
        """
        torch_compat.check_version()
        self.request = PlanRequest.of(**options)
        self.hooks_key = "".join(map(register, self._all_hooks()))
        self.lower = lower
        self.agree = None if rank_wait_s is None else self._agreement(rank_wait_s)
        self.repro = folder_for(repro)
        if type(strict) is not bool:
            raise ProblemError(
                f"strict is {strict!r}; expected False (a later recompilation whose budget cannot be held runs at the "
                "least peak, with a warning) or True (it is refused)"
            )
        if type(exact_branches) is not bool:
            raise ProblemError(
                f"exact_branches is {exact_branches!r}; expected True (Inductor rounds every 16-bit result of a graph "
                "that branches on one) or False (it rounds as by default)"
            )
        if check not in (None, "recomputed"):
            raise ProblemError(f"check is {check!r}; expected None or 'recomputed'")
        self.strict, self.exact_branches, self.check = strict, exact_branches, check
        self.graphs = CompiledGraphs()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except ``graphs``, for copying and pickling.

        AOTAutograd copies this object for AOTAutograd's cache keys, which must not depend on earlier steps.
        """
        return {k: v for k, v in vars(self).items() if k != "graphs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, graphs=CompiledGraphs())

    @property
    def in_bytes(self) -> bool:
        """Whether the requested budget, or the budget of a saved plan, is in bytes.

        With dynamic shapes, a budget in bytes must be met at every size.
        """
        plan = self.request.plan
        plans = plan.plans if isinstance(plan, PlanSet) else (plan,)
        budgets = [self.request.budget, *(p.requested for p in plans if isinstance(p, Plan))]
        return any(b.in_bytes for b in budgets)

    @property
    def with_others(self) -> bool:
        """Whether other ranks of the job may run this rank's plan, too."""
        return self.agree is not None and other_ranks() is not None

    def largest(self, number: int) -> int:
        """Return the largest number that any rank of the job passes to this method.

        Every rank that runs the newest plan must call this method. If the job has no other ranks, ``number`` is
        returned.
        """
        if self.agree is None or (ranks := other_ranks()) is None:
            return number
        return ranks.largest(number, self.agree.wait_s)

    def _agreement(self, wait_s: float) -> AgreeRanks:
        """Return the pass by which ranks with the same options agree on a decision."""
        request = self.request
        if request.pipeline is None:
            # Ranks share no plan that offloads values, and the rate of a measured link differs between them.
            request = replace(request, plan=None, offload=None)
            options = request.to_options() | {"solver": request.solver.name}
        else:
            options = {
                "pipeline": str(request.pipeline),
                "reread_inputs": str(request.reread_inputs),
            }
        options |= {"lowering": self.lower, "remat": __version__}
        return AgreeRanks(
            options=", ".join(f"{name} {text}" for name, text in options.items()),
            wait_s=wait_s,
            capacity_too=request.budget.on_peak,
        )

    def _all_hooks(self) -> list[SavedTensorHooks]:
        """Return the saved-tensor hooks of the options and of the pipeline."""
        request = self.request
        passes = () if request.pipeline is None else request.pipeline.flat()
        packed = [p.hooks for p in passes if isinstance(p, PackSaved)]
        return packed if request.hooks is None else [request.hooks, *packed]

    @property
    def cacheable(self) -> bool:
        """Whether the cache key identifies a compilation across processes.

        The result is False if a saved-tensor hook has no ``cache_key``.
        """
        return all(h.cache_key is not None for h in self._all_hooks())

    def key(self, *, graphs_only: bool = False, **more: Any) -> str:
        """Return the cache key of a compilation under these options.

        Args:
            graphs_only: whether the key is only for caches of compiled forward and backward graphs.
                Such graphs already contain the decision, so the key leaves out the options and
                ``more``.
            more: further values that affect the decision, by name.
        """
        decisive: dict[str, Any] = {
            "hooks": self.hooks_key,
            "around": surroundings(),
            "sizes": sorted(planned_sizes().items()),
        }
        if not graphs_only:
            decisive |= {"options": self.described(), **more}
            plan = self.request.plan
            if isinstance(plan, PlanSet) and plan.has_equal_graphs:
                # Each of several equal graphs takes the next plan, so the number of earlier graphs decides which plan.
                decisive["partitioned"] = self.graphs.partitioned.total()
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
        return f"remat-{__version__}-{digest.hexdigest()}"

    def described(self) -> dict[str, Any]:
        """Return all attributes that affect the decision, as a dict from the attribute's name to a JSON value.

        Attributes that do not affect the decision are excluded by name, so that a new option is
        included by default.
        """
        given = {f.name: getattr(self.request, f.name) for f in fields(self.request)}
        given |= {name: value for name, value in vars(self).items() if name not in _DECIDES_NOTHING}
        values = {name: described(value) for name, value in given.items()}
        if self.request.pipeline is not None:
            values["pipeline"] = str(self.request.pipeline)
        values["hooks"] = self.hooks_key
        return values

    @property
    def keeps_steps(self) -> bool:
        """Whether a whole compiled step may come from a cache with its plan, without planning.

        The result is False if a pipeline, a hook without a cache key, or code from outside remat
        takes part in the decision. The result is also False if ranks must agree on the decision.
        """
        if not self.cacheable or not self.graphs.from_caches:
            return False
        if self.request.pipeline is not None or self.check is not None:
            return False
        return not self.with_others and is_known_elsewhere(self.described())
