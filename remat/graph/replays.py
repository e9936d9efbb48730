"""Nodes that may run a second time; random operators replay their draw from a saved generator state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PlanError
from remat.graph import ops
from remat.graph.storages import tensors_of

#: Bytes of a generator's state, on the devices on which PyTorch can run an operator from one: on CUDA and XPU
#: a seed and an offset of 8 bytes each (``CUDAGeneratorImpl::get_state``, ``XPUGeneratorImpl::get_state``).
#: Of MPS, whose state has 36, it cannot (``torch/_prims/rng_prims.py``); of HPU the size is not known.
_STATE_BYTES = {"cpu": 5056, "cuda": 16, "xpu": 16}


class Replays:
    """Which random operators of a graph can be run again from a saved generator state.

    PyTorch saves and restores the state of the *current* device's generator, and only of the default
    one. Where operators draw on several accelerators, that is some other device's for all but one of
    them; so none is replayed, and what they draw is saved.

    Args:
        nodes: all random operators of the graph; others among them do no harm.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        devices = {random_device(n) for n in nodes if ops.is_random(n)}
        self._several = sum(d.type != "cpu" for d in devices) > 1

    def __call__(self, node: fx.Node) -> bool:
        """Whether a random operator can be replayed."""
        if not isinstance(node.target, torch_compat.OpOverload) or _is_seed_source(node):
            return False
        if ops.is_opaque(node) or node.kwargs.get("generator") is not None:
            return False
        kind = _dispatched_to(node)
        return kind == "cpu" or (kind in _STATE_BYTES and not self._several)

    def forbid(self, node: fx.Node) -> bool:
        """Whether a second run would be noticed, so that even a tag for recomputation gives way.

        An element of a tuple goes by the operator that makes the tuple.
        """
        maker = maker_of(node)
        if maker.op != "call_function":
            return False
        if ops.is_random(maker) and not self(maker):
            return True
        return ops.is_effectful(maker) or ops.is_opaque(maker) or is_read_uninitialised(maker)


def is_read_uninitialised(node: fx.Node) -> bool:
    """Whether memory that the node allocates is read without being written."""
    return ops.is_uninitialised(node) and not all(ops.ignores_content(u) for u in node.users)


def is_element(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def maker_of(node: fx.Node) -> fx.Node:
    """The operator that makes the tuple that a node is an element of; any other node is its own."""
    while is_element(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def state_bytes(node: fx.Node) -> int:
    """Bytes of the generator state that replaying a random operator needs.

    Raises:
        PlanError: PyTorch cannot replay it on its device.
    """
    kind = _dispatched_to(node)
    if kind not in _STATE_BYTES:
        raise PlanError(
            f"'{node.name}' ({node.target}) draws random numbers on {kind or 'no device that it names'}, where "
            f"PyTorch cannot replay them; expected {', '.join(_STATE_BYTES)}; its result must be saved"
        )
    return _STATE_BYTES[kind]


def random_device(node: fx.Node) -> torch.device:
    """The device whose generator a random operator draws from."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return next((t.device for t in tensors_of(values)), torch.device("cpu"))


def _dispatched_to(node: fx.Node) -> str | None:
    """The type of the device that PyTorch takes an operator to draw on, by its arguments."""
    given = node.kwargs.get("device")
    if given:
        return torch.device(given).type  # type: ignore[arg-type]
    values = (a.meta.get("val") for a in node.args if isinstance(a, fx.Node))
    return next((v.device.type for v in values if isinstance(v, torch.Tensor)), None)


def _is_seed_source(node: fx.Node) -> bool:
    """Inductor's seed operators: their few bytes are saved, and what expands them is pure."""
    name = str(node.target)
    return "inductor_seed" in name or "inductor_rand_eager_offset" in name
