"""Plans beside compiled steps in PyTorch's caches.

AOTAutograd's cache hands out a compiled step without calling the partitioner. The plan of that step lies here, under
the keys of the step's two halves, with what else the partitioner would have done.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from remat import torch_compat
from remat.errors import RematError
from remat.files import Form, read_record, write_atomic, write_record
from remat.graph import ops, purity
from remat.graph.joint import JointGraph
from remat.graph.ops import attribute_of
from remat.graph.storages import planned_sizes, sizes_at
from remat.graph.text import parse_joint, print_joint
from remat.graph.text.values import has_numbers
from remat.integrations.compiled_memory import read_timeline
from remat.planning.plan import Plan
from remat.planning.planner import plan_graph
from remat.planning.request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlan:
    """Cached record of the plan of a compiled step.

    Attributes:
        plan: JSON of the plan; empty if a step has none, since it has nothing to differentiate.
        joint: text of the joint graph as it was captured; the modules of the plan are made of it.
        parameters: shapes and dtypes of its parameters.
        operators: its operators that are not PyTorch's own, each with what was known of it.
        timeline: memory of the compiled step, as `compiled_memory.write_timeline` writes it; empty if it is not known.
        warnings: what planning warned of: modules and names of the classes, and the texts.
    """

    form: ClassVar[Form] = Form("step", "version", 3)

    plan: str = ""
    joint: str = ""
    parameters: str = ""
    operators: tuple[tuple[str, str], ...] = ()
    warnings: tuple[tuple[str, str, str], ...] = ()
    timeline: str = ""

    def warn_again(self) -> None:
        """Repeat the warnings of planning."""
        for module, name, text in self.warnings:
            warnings.warn(text, _category(module, name), stacklevel=2)

    def read(self, request: PlanRequest, graph: str) -> Plan:
        """The plan; its modules are built on first access.

        Args:
            request: what the step was planned under.
            graph: name of the graph in this process.

        Raises:
            PlanError: the record holds no plan.
        """
        plan = replace(Plan.from_json(self.plan), _sizes=planned_sizes())
        again = partial(_made_again, plan, self.joint, request.hooks, request.reread_inputs)
        with contextlib.suppress(ValueError, TypeError):  # what is no timeline tells nothing
            plan = replace(plan, _timeline=read_timeline(self.timeline))
        return replace(plan, graph=graph, _again=again)


def _made_again(plan: Plan, joint: str, hooks: Any, reread_inputs: bool) -> Plan:
    """A plan with its modules, from the text of its joint graph."""
    # What a cache holds was edited by nobody, and the plan may be one of several.
    asked = replace(plan, remat="")
    request = PlanRequest.of(plan=asked, hooks=hooks, reread_inputs=reread_inputs)
    with sizes_at(plan.planned_for):
        return plan_graph(parse_joint(joint), replace(request, of_several=True), in_place=True)


def _category(module: str, name: str) -> type[Warning]:
    """The warning class of remat with this name, else its base class: a cache file must not trigger other imports."""
    if module.partition(".")[0] != "remat":
        return UserWarning
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return UserWarning
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning


def keep(keys: Sequence[str], record: CachedPlan) -> None:
    """Write a record under the keys of both compiled graphs. A failed write only means a later cache miss."""
    try:
        path = _path(keys)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, write_record(record))
    except OSError:
        return


def find(keys: Sequence[str]) -> CachedPlan | None:
    """The record of a step, if it is complete and still holds.

    It does not if an operator of the step is no longer what it was: tagged, declared or written
    otherwise.
    """
    try:
        record = read_record(CachedPlan, _path(keys).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or damaged
        return None
    return record if all(_known_of(name) == known for name, known in record.operators) else None


def operators_of(joint: JointGraph) -> tuple[tuple[str, str], ...]:
    """The operators of a joint graph, and of the graphs that it calls, that are not PyTorch's own."""
    found = {
        purity.name_of(node.target)
        for module in joint.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch_compat.OpOverload) and not purity.is_shipped(node.target)
    }
    return tuple((name, _known_of(name)) for name in sorted(found))


def _known_of(name: str) -> str:
    """Properties that decide whether an operator may run again: schema, tags, effects and declarations."""
    try:
        op = purity.overload_named(name)
    except RematError:
        return ""  # no longer registered
    tags = sorted(map(str, op.tags))
    return f"{torch_compat.schema(op)} {tags} {torch_compat.get_effect(op)} {ops.is_known(op)}"


def graph_keys(compiled: Any) -> tuple[str, ...] | None:
    """The cache keys of the graphs of a step from AOTAutograd's cache; backward may be missing.

    None where the step cannot be asked for them.
    """
    serialize = None
    seen = 0
    while compiled is not None and serialize is None and seen < 16:
        serialize = getattr(compiled, "serialize", None)
        compiled = getattr(compiled, "__wrapped__", None)
        seen += 1
    if serialize is None:
        return None
    try:
        entry = serialize()
        graphs = (
            [entry.compiled_fw]
            if entry.compiled_bw is None
            else [entry.compiled_fw, entry.compiled_bw]
        )
        return tuple(str(graph.fx_graph_cache_info[0]) for graph in graphs)
    except Exception:  # another PyTorch version or a bundled artifact: there is no key
        return None


def traces_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Digest of the parts of a Dynamo graph that a plan uses and AOTAutograd's key omits.

    Source lines and names of modules, what users have annotated, and the sizes that symbols stand for now.
    """
    digest = hashlib.sha256()
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            meta = node.meta
            stack = [
                (str(where), getattr(kind, "__qualname__", str(kind)))
                for where, kind in (meta.get("nn_module_stack") or {}).values()
            ]
            shown = (
                meta.get("stack_trace"),
                stack,
                sorted(map(repr, (meta.get("custom") or {}).items())),
            )
            digest.update(repr(shown).encode())
    for value in inputs:
        digest.update(repr(_sizes(value)).encode())
    return digest.hexdigest()


def _sizes(value: Any) -> Any:
    """Sizes and strides of an input with numbers for symbols."""
    if hasattr(value, "shape") and hasattr(value, "stride"):
        try:
            return [*map(_number, value.shape), "/", *map(_number, value.stride())]
        except (RuntimeError, NotImplementedError):  # no strides: sparse, nested
            return [*map(_number, value.shape)]
    return _number(value)


def _number(size: Any) -> Any:
    node = getattr(size, "node", None)
    return size if node is None else getattr(node, "hint", None) or str(size)


def _path(keys: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    return Path(torch_compat.cache_dir()) / "remat" / digest[:2] / f"{digest}.json"


def text_of(joint: Any) -> str | None:
    """Return the text of a joint graph; None if a plan's modules could not be built from the text alone.

    The text gives the numbers of small constants. It does not give those of large ones.
    """
    fetched = joint.graph.find_nodes(op="get_attr")
    if not all(has_numbers(attribute_of(joint.graph_module, node.target)) for node in fetched):
        return None
    try:
        return print_joint(joint)
    except RematError:
        return None
