"""Classify nodes as forward or backward, and measure their distance from backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph, Role, role_of, split_outputs

#: Distance of a node that has no path to backward.
UNREACHABLE = 10**9


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """Classification of the nodes of a joint graph; every tuple is indexed by node position.

    Attributes:
        placeholders: role of each placeholder, by position.
        required_forward: whether forward must run the node, because a forward output, an effect or
            a random draw of forward depends on it.
        tangent_closure: whether the node must run in backward. Such a node depends on a tangent or
            another placeholder of backward, or on another such node. Or the node has an effect or
            draws random numbers, and AOTAutograd traced the node in the user's backward.
        required_backward: whether the node must run in backward or is a backward output.
        forward_order: index of the node among the required forward nodes; -1 for all other nodes.
    """

    placeholders: dict[int, Role]
    required_forward: tuple[bool, ...]
    tangent_closure: tuple[bool, ...]
    required_backward: tuple[bool, ...]
    forward_order: tuple[int, ...]

    @cached_property
    def first_late(self) -> int:
        """Position of the first node in `tangent_closure` that is not a placeholder; the number of nodes if none is."""
        late = (i for i, is_late in enumerate(self.tangent_closure) if is_late)
        return next((i for i in late if i not in self.placeholders), len(self.tangent_closure))

    def unclaimed(self, position: int) -> bool:
        """Return whether neither forward nor backward requires the node at a position."""
        return not (self.required_forward[position] or self.required_backward[position])


def classify(joint: JointGraph, index: GraphIndex) -> Roles:
    """Classify the nodes of a joint graph, as ``torch/_functorch/partitioners.py`` does.

    Collectives, random operators, and operators that have or may have effects must run even if no node reads their
    results. AOTAutograd's tag decides whether an operator that must run belongs to forward or to backward.
    """
    n = len(index)
    fwd_outputs, bwd_outputs, _, _ = split_outputs(joint)
    placeholders: dict[int, Role] = {}
    tangent = bytearray(n)
    roots: list[int] = [index.position[o] for o in fwd_outputs if isinstance(o, fx.Node)]
    # Nodes stand in topological order, so a single pass finds the tangent closure.
    for i, reads in enumerate(index.inputs):
        for j in reads:
            if tangent[j]:
                tangent[i] = 1
                break
        node = index.nodes[i]
        if not reads and node.op == "placeholder":
            role = placeholders[i] = role_of(node)
            tangent[i] = role.in_backward
        elif must_be_in_backward(node):
            tangent[i] = 1
        elif node.meta.get("partitioner_tag") == "must_be_in_forward":
            roots.append(i)
        # Otherwise the random state after a step would depend on the plan, and another rank might wait for this one
        # forever.
        elif not index.plain[i] and ops.may_have_effects(node):
            if belongs_to_backward(node):
                tangent[i] = 1
            else:
                roots.append(i)
    required = bytearray(n)
    stack = roots
    while stack:
        i = stack.pop()
        if not required[i] and not tangent[i]:
            required[i] = 1
            stack.extend(index.inputs[i])
    backward = bytearray(tangent)
    for o in bwd_outputs:
        if isinstance(o, fx.Node):
            backward[index.position[o]] = 1
    order, count = [-1] * n, 0
    for i in range(n):
        if required[i]:
            order[i], count = count, count + 1
    return Roles(
        placeholders=placeholders,
        required_forward=tuple(map(bool, required)),
        tangent_closure=tuple(map(bool, tangent)),
        required_backward=tuple(map(bool, backward)),
        forward_order=tuple(order),
    )


def distances(index: GraphIndex, roles: Roles) -> tuple[int, ...]:
    """Return each node's distance, in edges, to the nearest node that forward does not require.

    The distances equal ``dist_from_bw`` of ``torch/_functorch/partitioners.py``. The distance is 0
    for nodes that forward does not require, and `UNREACHABLE` for nodes without a path to such a node.
    """
    distance = [0] * len(index)
    # Users stand behind a node in graph order, so their distances are known already.
    for i in range(len(index) - 1, -1, -1):
        if roles.required_forward[i]:
            nearest = UNREACHABLE
            for u in index.users[i]:
                if distance[u] < nearest:
                    nearest = distance[u] + 1
            distance[i] = nearest
    return tuple(distance)


def belongs_to_backward(node: fx.Node) -> bool:
    """Return whether AOTAutograd traced the node while the user's backward ran."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def must_be_in_backward(node: fx.Node) -> bool:
    """Return whether AOTAutograd marked a node to run in backward, as it marks its final writes to inputs."""
    return bool(node.meta.get("partitioner_tag") == "must_be_in_backward")


def has_tangents(joint: JointGraph) -> bool:
    """Return whether a joint graph has a backward: a tangent as input and a gradient as output."""
    return any(
        n.op == "placeholder" and role_of(n) is Role.TANGENT for n in joint.graph.nodes
    ) and any(isinstance(o, fx.Node) for o in split_outputs(joint)[1])
