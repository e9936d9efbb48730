"""Small graphs for tests, traced from plain functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import remat
from remat.graph.joint import output_node


def traced(f: Callable[..., Any], *args: torch.Tensor) -> remat.JointGraph:
    """Just what the function does, every output a forward output: no autograd, no decompositions."""
    module = make_fx(f, tracing_mode="fake", _disable_torch_fn_metadata_mode=True)(*args)
    outputs = pytree.arg_tree_leaves(*output_node(module.graph).args)
    return remat.JointGraph(graph_module=module, num_fwd_outputs=len(outputs))


def joint_of(f: Callable[..., Any], *args: torch.Tensor, **kwargs: Any) -> remat.JointGraph:
    """The joint graph of a training step, without decompositions."""
    torch._dynamo.reset()
    return remat.capture(f, args, lower="eager", **kwargs)


def calls(graph: fx.Graph | fx.GraphModule) -> list[str]:
    """Names of the nodes that compute something, in order."""
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [n.name for n in graph.nodes if n.op == "call_function"]


def placeholders(graph: fx.Graph | fx.GraphModule) -> list[str]:
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [n.name for n in graph.nodes if n.op == "placeholder"]


def renumbered(text: str, *stems: str) -> str:
    """A graph's text with the names of these stems counted anew, in the order in which they come up.

    With symbolic sizes, what PyTorch traces for guards takes names too, in some versions.
    """
    for stem in stems:
        name = re.compile(rf"(?<![.\w]){stem}(?:_\d+)?(?![.\w])")
        found = {
            old: f"{stem}_{k}" if k else stem
            for k, old in enumerate(dict.fromkeys(name.findall(text)))
        }
        text = name.sub(lambda m, found=found: found[m[0]], text)
    return text


def node(joint: remat.JointGraph, name: str) -> fx.Node:
    (found,) = (n for n in joint.graph.nodes if n.name == name)
    return found


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)
