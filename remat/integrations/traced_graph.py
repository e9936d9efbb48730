"""Read a graph from Dynamo or AOTAutograd: its code, its name in messages, and its `JointGraph`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph.joint import JointGraph, primals_of

#: Pattern of Dynamo's path of a submodule, such as ``L['self'].blocks``; the group is the local variable's name.
_OF_LOCAL = re.compile(r"L\['(\w+)'\]\.")


def code_of(parameters: str) -> str:
    """Return a text that identifies the code that Dynamo compiles now, and the code's parameters.

    A recompilation of the code, such as for other shapes, gets the same text. The returned text
    consists of Dynamo's number of the code and of ``parameters``. Two layers of one class share
    code, but may differ in the shapes of their parameters. The returned text is empty if
    Dynamo is not compiling.
    """
    where = torch_compat.CompileContext.current_compile_id()
    return "" if where is None or where.frame_id is None else f"{where.frame_id}: {parameters}"


def parameters_of(joint: JointGraph) -> str:
    """Return, as text, the shapes and dtypes of a graph's parameters and buffers."""
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    static = [inputs[i].meta.get("val") for i in joint.static_inputs if i < len(inputs)]
    return ", ".join(f"{tuple(v.shape)} {v.dtype}" for v in static if isinstance(v, torch.Tensor))


def joint_of(gm: fx.GraphModule, lower: str, **convention: Any) -> JointGraph:
    """Convert the joint graph that AOTAutograd gives a partitioner to a `JointGraph`.

    Args:
        gm: the joint graph.
        lower: lowering of the graph, ``"inductor"`` or ``"eager"``.
        convention: ``num_fwd_outputs`` and ``static_lifetime_input_indices``, as AOTAutograd gives
            them to a partitioner.
    """
    joint = JointGraph(
        graph_module=gm,
        num_fwd_outputs=int(convention["num_fwd_outputs"]),
        static_inputs=tuple(convention.get("static_lifetime_input_indices") or ()),
        lower=lower,
        name=name_of(gm),
    )
    # From PyTorch 2.15 on, Inductor reads this mark. It treats backward inputs without a mark as static, that is, as
    # having the same address in every step.
    for place, node in enumerate(primals_of(joint)):
        node.meta["is_static_input"] = place in joint.static_inputs
    return joint


def name_of(gm: fx.GraphModule) -> str:
    """Return a name for a graph, made of the class of the user's module and Dynamo's number of the graph.

    If no single module contains all modules of the graph, the name has the word ``graph`` instead of a class. Dynamo's
    number of the graph is left out if Dynamo is not compiling.
    """
    where = torch_compat.CompileContext.current_compile_id()
    stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
    roots = {next(iter(stack.items())) for stack in stacks if stack}
    label = "graph"
    # Dynamo lists the modules that the traced function calls, but not the module whose ``forward`` it traces.
    owners = {m[1] if (m := _OF_LOCAL.match(path)) else "" for _, (path, _) in roots}
    is_traced = where is not None and len(owners) == 1
    owner = torch_compat.traced_frame()[1].get(owners.pop()) if is_traced else None
    if isinstance(owner, torch.nn.Module):
        label = type(owner).__name__
    elif len(roots) == 1:
        kind = roots.pop()[1][1]
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        label = name.rpartition(".")[2]
    return label if where is None else f"{label} {where}"
