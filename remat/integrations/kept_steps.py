"""What is kept beside a compiled step in PyTorch's caches, so that whoever finds the step has its plan too.

AOTAutograd's cache hands out a compiled step without calling the partitioner. Here lies, under the keys of
the step's two halves, what the partitioner would have left behind: the plan, the joint graph as text, from
which the plan's modules are made if somebody asks for them, and the warnings that planning drew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from remat import torch_compat
from remat.errors import RematError
from remat.files import Form, read_record, write_record, write_whole
from remat.graph import ops, purity
from remat.graph.joint import JointGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What planning left behind.

    Attributes:
        plan: JSON of the plan; empty where a step has none, since it has nothing to differentiate.
        joint: text of the joint graph as it was captured.
        parameters: shapes and dtypes of its parameters.
        operators: its operators that are not PyTorch's own, each with what was known of it.
        timeline: memory of the compiled step, as `compiled_memory.write_timeline` writes it; empty where it
            is not known.
        warnings: what planning warned of: modules and names of the classes, and the texts.
    """

    form: ClassVar[Form] = Form("step", "version", 3)

    plan: str = ""
    joint: str = ""
    parameters: str = ""
    operators: tuple[tuple[str, str], ...] = ()
    warnings: tuple[tuple[str, str, str], ...] = ()
    timeline: str = ""


def keep(halves: Sequence[str], kept: Kept) -> None:
    """Writes what was left behind for a step; what cannot be written is not there to be found."""
    try:
        path = _path(halves)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write_record(kept))
    except OSError:
        return


def find(halves: Sequence[str]) -> Kept | None:
    """What was left behind for a step, if it is all there and still holds.

    It does not where an operator of the step is no longer what it was: tagged, declared or written
    otherwise.
    """
    try:
        kept = read_record(Kept, _path(halves).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or damaged
        return None
    return kept if all(_known_of(name) == known for name, known in kept.operators) else None


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
    """What decides how often an operator runs: schema, tags, effects and declarations."""
    try:
        op = purity.overload_named(name)
    except RematError:
        return ""  # no longer registered
    tags = sorted(map(str, op.tags))
    return f"{torch_compat.schema(op)} {tags} {torch_compat.get_effect(op)} {ops.is_known(op)}"


def halves_of(compiled: Any) -> tuple[str, ...] | None:
    """The keys of the halves of a step that was found in AOTAutograd's cache; backward may be missing.

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
        halves = (
            [entry.compiled_fw]
            if entry.compiled_bw is None
            else [entry.compiled_fw, entry.compiled_bw]
        )
        return tuple(str(half.fx_graph_cache_info[0]) for half in halves)
    except Exception:  # of another PyTorch, or bundled: then it is not to be known
        return None


def key_of(compiled: Any) -> str | None:
    """The key of a half that Inductor has compiled, if its own cache keeps it."""
    return torch_compat.cache_key(compiled)


def traces_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """A digest of what AOTAutograd's key leaves out of a graph of Dynamo's, and a plan depends on or shows.

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


def _path(halves: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(halves).encode()).hexdigest()
    return Path(torch_compat.cache_dir()) / "remat" / digest[:2] / f"{digest}.json"


def text_of(joint: Any) -> str | None:
    """The text of a joint graph; None where the text would not say all, as of the numbers of constants."""
    from remat.graph.text import print_joint

    if any(node.op == "get_attr" for node in joint.graph.nodes):
        return None
    try:
        return print_joint(joint)
    except RematError:
        return None
