"""Decide which random operators can run again with the same result, from a saved generator state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PlanError
from remat.graph import ops
from remat.graph.memory.storages import tensors_of

#: Bytes of a generator state, for the device types on which PyTorch can run an operator from a state. CUDA and
#: XPU store a seed and an offset of 8 bytes each (``CUDAGeneratorImpl::get_state``,
#: ``XPUGeneratorImpl::get_state``). MPS has a state of 36 bytes, but PyTorch cannot run an operator from it
#: (``torch/_prims/rng_prims.py``). The size for HPU is unknown.
_STATE_BYTES = {"cpu": 5056, "cuda": 16, "xpu": 16}


class Replays:
    """Decides which random operators among some nodes can run again from a saved generator state."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        devices = {random_device(n) for n in nodes if ops.is_random(n)}
        # PyTorch saves and restores the state of the *current* device's default generator only. With several
        # accelerators, this is the wrong generator for all but one, so their results are saved instead.
        self._several = sum(d.type != "cpu" for d in devices) > 1

    def __call__(self, node: fx.Node) -> bool:
        """Return whether a random operator can be replayed from a saved generator state."""
        if not isinstance(node.target, torch_compat.OpOverload) or _is_seed_source(node):
            return False
        # PyTorch saves and restores the default generator's state only.
        if ops.is_opaque(node) or node.kwargs.get("generator") is not None:
            return False
        kind = _dispatched_to(node)
        return kind == "cpu" or (kind in _STATE_BYTES and not self._several)

    def forbid(self, node: fx.Node) -> bool:
        """Return whether a second run of a node would be observable; a ``getitem`` counts as the call that it reads."""
        maker = maker_of(node)
        if maker.op != "call_function":
            return False
        if ops.is_random(maker) and not self(maker):
            return True
        return ops.is_effectful(maker) or ops.is_opaque(maker) or is_read_uninitialised(maker)


def is_read_uninitialised(node: fx.Node) -> bool:
    """Return whether a node allocates uninitialised memory whose content another node reads."""
    return ops.is_uninitialised(node) and not all(ops.ignores_content(u) for u in node.users)


def is_element(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def maker_of(node: fx.Node) -> fx.Node:
    """Return the node that computes the tuple of a ``getitem`` node; return any other node itself."""
    while is_element(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def state_bytes(node: fx.Node) -> int:
    """Return the bytes of the generator state needed to replay a random operator.

    Raises:
        PlanError: PyTorch cannot replay the operator on its device.
    """
    kind = _dispatched_to(node)
    if kind not in _STATE_BYTES:
        raise PlanError(
            f"'{node.name}' ({node.target}) draws random numbers on {kind or 'no device that it names'}, where "
            f"PyTorch cannot replay them; expected {', '.join(_STATE_BYTES)}; its result must be saved"
        )
    return _STATE_BYTES[kind]


def random_device(node: fx.Node) -> torch.device:
    """Return the device whose generator a random operator draws from."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return next((t.device for t in tensors_of(values)), torch.device("cpu"))


def _dispatched_to(node: fx.Node) -> str | None:
    """Return the device type on which PyTorch replays a random operator."""
    device = node.kwargs.get("device")
    if device:
        return torch.device(device).type  # type: ignore[arg-type]
    # PyTorch takes the type from the operator's arguments.
    values = (a.meta.get("val") for a in node.args if isinstance(a, fx.Node))
    return next((v.device.type for v in values if isinstance(v, torch.Tensor)), None)


def _is_seed_source(node: fx.Node) -> bool:
    """Return whether a node is one of Inductor's operators that create random seeds."""
    name = str(node.target)
    # The few bytes of a seed are saved, so these operators need no replay.
    return "inductor_seed" in name or "inductor_rand_eager_offset" in name
