"""Store plans beside compiled steps in PyTorch's caches.

AOTAutograd's cache returns a compiled step without calling the partitioner. This module stores the
step's plan in a file whose name derives from the cache keys of the forward and backward graph. The
plan's file also has the warnings of planning, and the operators whose change makes the plan
outdated.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PeakWarning, RematError, Warned, warn
from remat.files import Form, read_record, write_atomic, write_record
from remat.graph import ops, purity
from remat.graph.joint import JointGraph
from remat.graph.memory.storages import SYMBOLIC, numbers_of, planned_sizes, sizes_at
from remat.graph.ops import attribute_of
from remat.graph.text import parse_joint, print_joint
from remat.graph.text.values import has_numbers
from remat.integrations.compiled_memory import read_timeline
from remat.integrations.traced_graph import parameters_of
from remat.passes.packing.pairs import HooksWarning
from remat.planning.plan import Plan
from remat.planning.planner import plan_graph
from remat.planning.request import PlanRequest

#: The warnings of planning that concern later processes too, by name.
_REPEATED = {kind.__name__: kind for kind in (PeakWarning, HooksWarning)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlan:
    """Cached record of the plan of a compiled step.

    Attributes:
        plan: JSON of the plan; empty until the step is compiled.
        joint: text of the joint graph as captured. The plan's modules are built from this text on
            first access.
        parameters: shapes and dtypes of the step's parameters.
        operators: pair (name, properties as text) for each operator of the graph that is not
            PyTorch's own; see `operators_of`.
        warnings: warnings of planning, as (name of the class, message); see `repeated`.
        timeline: JSON of the compiled step's memory, from `compiled_memory.write_timeline`; empty
            if unknown.
    """

    form: ClassVar[Form] = Form("step", "version", 4)

    plan: str = ""
    joint: str = ""
    parameters: str = ""
    operators: tuple[tuple[str, str], ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()
    timeline: str = ""

    def read(self, request: PlanRequest, graph: str) -> Plan:
        """Return the plan that this cached record describes, and repeat the warnings that its planning gave.

        The plan's modules are built on first access.

        Raises:
            PlanError: the record does not hold a valid plan.
        """
        for name, text in self.warnings:
            warn(text, _REPEATED.get(name, UserWarning))
        plan = replace(Plan.from_json(self.plan), _sizes=planned_sizes())
        again = partial(_made_again, plan, self.joint, request.hooks, request.reread_inputs)
        # Without a valid timeline, the plan simulates one.
        with contextlib.suppress(ValueError, TypeError):
            plan = replace(plan, _timeline=read_timeline(self.timeline))
        return replace(plan, graph=graph, _again=again)


def _made_again(plan: Plan, joint: str, hooks: Any, reread_inputs: bool) -> Plan:
    """Apply a cached plan to its joint graph, and return the plan with its graph modules."""
    # Without a version in ``remat``, the plan's numbers are not checked, since users do not edit cached plans.
    # ``of_several`` skips the check of a peak budget, which may be one budget for several graphs.
    unchecked = replace(plan, remat="")
    request = PlanRequest.of(plan=unchecked, hooks=hooks, reread_inputs=reread_inputs)
    with sizes_at(plan.planned_for):
        return plan_graph(parse_joint(joint), replace(request, of_several=True), in_place=True)


def repeated(warned: Sequence[Warned]) -> tuple[tuple[str, str], ...]:
    """Return those warnings of planning that a later process repeats when it restores the plan from a cache.

    Warnings that concern this process only, such as those about budgets and measured costs, are not repeated.

    Returns:
        Pairs (name of the warning's class, message), as in `CachedPlan`.
    """
    names = {kind: name for name, kind in _REPEATED.items()}
    return tuple((names[kind], text) for text, kind in warned if kind in names)


def record_of(joint: JointGraph) -> CachedPlan | None:
    """Return a cache record of a joint graph, to which the caller adds the plan; None if the graph has no text form.

    The text of a graph omits the values of large constants, so a graph with such a constant has no record.
    """
    fetched = joint.graph.find_nodes(op="get_attr")
    if not all(has_numbers(attribute_of(joint.graph_module, node.target)) for node in fetched):
        return None
    try:
        text = print_joint(joint, modules=True)
    except RematError:
        return None
    return CachedPlan(joint=text, parameters=parameters_of(joint), operators=operators_of(joint))


def keep(keys: Sequence[str], record: CachedPlan) -> None:
    """Write a plan's record to a cache file, which the keys of the compiled forward and backward graph identify.

    A failed write is ignored, since its only effect is a cache miss in a later process.

    Args:
        keys: cache keys of the compiled forward and backward graph.
        record: the record.
    """
    try:
        path = _path(keys)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, write_record(record))
    except OSError:
        return


def find(keys: Sequence[str]) -> CachedPlan | None:
    """Return the plan's record that `keep` wrote for a step; None if the record is missing, damaged or outdated.

    A record is outdated if an operator of the step now has another schema, tags, effect or
    declaration, such as one by `remat.declare_pure`.

    Args:
        keys: cache keys of the compiled forward and backward graph.
    """
    try:
        record = read_record(CachedPlan, _path(keys).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is missing or damaged
        return None
    return record if all(_known_of(name) == cached for name, cached in record.operators) else None


def operators_of(joint: JointGraph) -> tuple[tuple[str, str], ...]:
    """Return the operators of a joint graph that are not PyTorch's own, with their properties.

    The result includes operators of graphs that the joint graph calls.

    Returns:
        Pairs (name, properties as text), sorted by name.
    """
    operators = {
        purity.name_of(node.target)
        for module in joint.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch_compat.OpOverload) and not purity.is_shipped(node.target)
    }
    return tuple((name, _known_of(name)) for name in sorted(operators))


def _known_of(name: str) -> str:
    """Return an operator's schema, tags, effect and declaration as text; empty if no such operator is registered."""
    # These properties decide whether an operator may be recomputed, so a cached plan depends on them.
    try:
        op = purity.overload_named(name)
    except RematError:
        return ""  # no longer registered
    tags = sorted(map(str, op.tags))
    return f"{torch_compat.schema(op)} {tags} {torch_compat.get_effect(op)} {ops.is_known(op)}"


def graph_keys(compiled: Any) -> tuple[str, ...]:
    """Return the keys of a compiled step's forward and backward graph in Inductor's cache.

    Returns:
        The keys of forward and backward; only the key of forward if nothing is differentiable.
        Empty if the keys cannot be read from the step.
    """
    for _ in range(16):  # a limit, in case wrappers refer to each other in a cycle
        if hasattr(compiled, "serialize"):
            break
        compiled = getattr(compiled, "__wrapped__", None)
    try:
        entry = compiled.serialize()
        graphs = (entry.compiled_fw, entry.compiled_bw)
        return tuple(str(graph.fx_graph_cache_info[0]) for graph in graphs if graph is not None)
    except Exception:  # a bundled artifact, or the step of another PyTorch version, has no keys
        return ()


def traces_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return a digest of those details of a Dynamo graph that AOTAutograd's cache key omits.

    The digest covers source lines, module names, user annotations, and the values of symbolic
    sizes, because plans use them.
    """
    digest = hashlib.sha256()
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            meta = node.meta
            stack = [*(meta.get("nn_module_stack") or {}).values()]
            annotations = sorted(map(repr, (meta.get("custom") or {}).items()))
            digest.update(repr((meta.get("stack_trace"), stack, annotations)).encode())
    for value in inputs:
        digest.update(repr(_sizes(value)).encode())
    return digest.hexdigest()


def _sizes(value: Any) -> list[Any]:
    """Return sizes and strides of an input, with each symbolic number replaced by its traced value."""
    numbers = numbers_of(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        numbers += value.stride()
    return [
        (getattr(n.node, "hint", None) or str(n)) if isinstance(n, SYMBOLIC) else n for n in numbers
    ]


def _path(keys: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    return Path(torch_compat.cache_dir()) / "remat" / digest[:2] / f"{digest}.json"
