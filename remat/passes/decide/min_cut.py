"""Pass that saves the values on a minimum cut, so that backward recomputes only cheap operators."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from torch import fx

from remat.errors import PlanError
from remat.graph import ops, purity
from remat.graph.capture.source import located
from remat.graph.collection import paused_collection
from remat.graph.problems.lowering import Lowered, SavedKind, tag_of
from remat.passes.core.base import Pass, Stage
from remat.passes.core.provenance import BanRules, Provenance, SavedLimits
from remat.passes.core.state import Analysis, PassResult, State
from remat.passes.decide.bans import Fusion, banned, cut_weights
from remat.solvers.graph.flow import InfeasibleCutError, Network


@dataclass(frozen=True)
class MinCut(BanRules, Pass):
    """Save the values on a minimum cut weighted by bytes; the options of the pass are the ban rules."""

    name: ClassVar[str] = "min-cut"
    stage: ClassVar[Stage] = Stage.DECIDE

    # Nearly all containers that planning makes stay alive, so the garbage collector finds nothing.
    @paused_collection()
    def run(self, state: State) -> PassResult:
        require_tangents(state)
        saved = state.get(RuntimeOptimalCut(self.rules))
        lowered = state.lowered()
        full_bytes = sum(lowered.problem.size[i] for i in saved)
        after = replace(
            state,
            cut_rules=self.rules,
            decision=lowered.decision(saved),
            limits=SavedLimits(full_bytes=full_bytes),
            provenance=Provenance(),
        )
        return PassResult(state=after, modified=True, detail=f"{full_bytes} bytes saved")

    @property
    def rules(self) -> BanRules:
        """The options of this pass as a plain `BanRules`, which analyses take as a parameter."""
        return BanRules(**asdict(self))


@dataclass(frozen=True)
class Fusibility(Analysis[Fusion]):
    """Which neighbouring nodes a fusing compiler can compute in one kernel."""

    name: ClassVar[str] = "fusibility"

    def compute(self, state: State) -> Fusion:
        return Fusion(state)


@dataclass(frozen=True)
class RuntimeOptimalCut(Analysis[tuple[int, ...]]):
    """The nodes of the graph problem that the runtime-optimal cut saves.

    The runtime-optimal cut recomputes only cheap operators: those that ``rules`` do not ban.

    Attributes:
        rules: the ban rules.

    Raises:
        PlanError: backward reads a value that can be neither saved nor recomputed.
    """

    name: ClassVar[str] = "cut"

    rules: BanRules = BanRules()

    def compute(self, state: State) -> tuple[int, ...]:
        lowered = state.lowered()
        ban = banned(state, self.rules, state.get(Fusibility()))
        fixed = [
            kind is SavedKind.VALUE and bool(ban[at])
            for kind, at in zip(lowered.kind, lowered.position, strict=True)
        ]
        return find_cut(state, fixed, biased=True)


def find_cut(state: State, fixed: list[bool], *, biased: bool) -> tuple[int, ...]:
    """Return the saved nodes of the minimum cut of the state's graph problem.

    Args:
        state: the state with the joint graph.
        fixed: for each node of the problem, True if the node must not be recomputed.
        biased: True: minimise the sum of the nodes' weights (`cut_weights`); False: minimise the
            saved bytes.

    Raises:
        PlanError: no cut exists; the message shows the path that makes the cut infeasible.
    """
    lowered = state.lowered()
    weight = lowered.problem.size
    if biased:
        weight = cut_weights(state, state.get(Fusibility()))
    try:
        return Network(lowered.problem, fixed=fixed).cut(weight).saved
    except InfeasibleCutError as error:
        raise PlanError(explain_conflict(state, lowered, error)) from error


def explain_conflict(state: State, lowered: Lowered, error: InfeasibleCutError) -> str:
    """Return a message that explains why a graph has no minimum cut, with the user's source lines.

    Args:
        state: the state with the joint graph.
        lowered: the state's graph problem.
        error: the error; ``error.chain`` has the conflicting nodes of the graph problem.
    """
    nodes = [state.index.nodes[lowered.position[i]] for i in error.chain]
    lines = [str(error)]
    for node in nodes:
        tag = node.meta.get("recompute")
        lines.append(
            f"  {located(node)}" + (f" (tagged {tag_of(node)})" if tag is not None else "")
        )
    if any(n.meta.get("recompute") is not None for n in nodes):
        lines.append("loosen a MUST_SAVE or MUST_RECOMPUTE tag on this path")
    else:
        why = " and ".join(runs_once(nodes[0]))
        lines.append(
            f"'{nodes[0].name}' {why + ', so that it ' if why else ''}must not run twice; keep it out of "
            "what is differentiated, or out of torch.compile"
        )
    return "\n".join(lines)


def runs_once(node: fx.Node) -> list[str]:
    """Return the reasons why an operator may run only once; empty if the operator may run again."""
    undeclared = ", ".join(repr(purity.name_of(op)) for op in ops.opaque_operators(node))
    reasons = {
        "draws random numbers": ops.is_random(node),
        "overwrites its input": ops.is_mutating(node),
        "has an effect": ops.is_effectful(node) and not ops.is_mutating(node),
        f"is not declared pure (remat.declare_pure({undeclared}))": ops.is_opaque(node),
    }
    return [why for why, holds in reasons.items() if holds]


def require_tangents(state: State) -> None:
    """Refuse a graph without a backward, because there is nothing to plan.

    Raises:
        PlanError: no node must run in backward.
    """
    if not any(state.roles.tangent_closure):
        raise PlanError(
            f"graph '{state.joint.name}' has no tangents: nothing in it is differentiated, so there "
            "is nothing to plan. Capture a model whose output requires a gradient"
        )
