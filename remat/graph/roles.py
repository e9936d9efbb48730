"""Whether each node belongs to forward or backward, and its distance from backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from remat.graph import ops
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph, Role, role_of, split_outputs

#: Distance of a node from which no path leads to backward.
UNREACHABLE = 10**9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """Classification of the nodes of a joint graph; every tuple is indexed by position.

    Attributes:
        placeholders: role of each placeholder, by position.
        required_forward: what forward's outputs, effects and random draws need from the primals.
        tangent_closure: what depends on a tangent, or may only run in backward.
        required_backward: the tangent closure plus the backward outputs.
        forward_order: number of a required-forward node among its like; -1 for others.
    """

    placeholders: dict[int, Role]
    required_forward: tuple[bool, ...]
    tangent_closure: tuple[bool, ...]
    required_backward: tuple[bool, ...]
    forward_order: tuple[int, ...]

    def unclaimed(self, position: int) -> bool:
        """Whether neither forward nor backward requires the node by itself."""
        return not (self.required_forward[position] or self.required_backward[position])


def classify(joint: JointGraph, index: GraphIndex) -> Roles:
    """Classifies the nodes of a joint graph, as ``torch/_functorch/partitioners.py`` does.

    A random operator or an effect that the user's forward performs is required by forward even if
    nothing reads it, so that the random stream after the step does not depend on the plan; one that
    the user's backward performs belongs to the tangent closure for the same reason. So does an
    operator that is not known to be a function of its inputs (`ops.is_opaque`).
    """
    n = len(index)
    fwd_outputs, bwd_outputs, _, _ = split_outputs(joint)
    placeholders: dict[int, Role] = {}
    tangent = bytearray(n)
    roots: list[int] = [index.position[o] for o in fwd_outputs if isinstance(o, fx.Node)]
    for i, reads in enumerate(index.inputs):
        for j in reads:
            if tangent[j]:
                tangent[i] = 1
                break
        node = index.nodes[i]
        if not reads and node.op == "placeholder":
            role = placeholders[i] = role_of(node)
            tangent[i] = role.in_backward
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
    """Least number of edges from each node to one that forward does not require.

    Such a node counts 0; `UNREACHABLE` without a path. It is ``dist_from_bw`` of
    ``torch/_functorch/partitioners.py``.
    """
    distance = [0] * len(index)
    for i in range(len(index) - 1, -1, -1):
        if roles.required_forward[i]:
            nearest = UNREACHABLE
            for u in index.users[i]:
                if distance[u] < nearest:
                    nearest = distance[u] + 1
            distance[i] = nearest
    return tuple(distance)


def belongs_to_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd traced the node while the user's backward ran."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def has_tangents(joint: JointGraph) -> bool:
    """Whether anything can be differentiated: a graph without tangents has no backward."""
    return any(
        n.op == "placeholder" and role_of(n) is Role.TANGENT for n in joint.graph.nodes
    ) and any(isinstance(o, fx.Node) for o in split_outputs(joint)[1])
