"""Several devices in one graph, and the generator that each of them draws from.

A build of PyTorch for the CPU makes fake CUDA tensors, but cannot differentiate them: such graphs are
written as text here and planned, not run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch import config

import remat
from remat.graph.text import parse_joint
from tests.graphs import node
from tests.hard.steps import check, pair

T = torch.Tensor


def test_shapes_without_memory() -> None:
    def f(x: T, w: T, shape: T) -> Any:
        meta = torch.nn.functional.dropout(torch.empty(6, 8, device="meta"), 0.5)
        return torch.tanh(x @ w).exp() * meta.shape[0], shape.sin() * 2

    check(lambda: (f, (*pair(), torch.empty(6, 8, device="meta"))))


#: Dropout of a sine on a device, of which backward reads mask and result.
INPUTS = "primals_{k}: {floats} = primal()\ntangents_{k}: {floats} = tangent()\n"
FORWARD = """\
sin_{k}: {floats} = aten.sin.default(primals_{k})
drop_{k}: ({floats}, {mask}) = aten.native_dropout.default(sin_{k}, 0.5, True){tag}
dropped_{k}: {floats} = drop_{k}[0]{tag}
mask_{k}: {mask} = drop_{k}[1]{tag}
exp_{k}: {floats} = aten.exp.default(dropped_{k})
"""
BACKWARD = """\
again_{k}: {floats} = aten.sin.default(dropped_{k})
local_{k}: {floats} = aten.mul.Tensor(tangents_{k}, again_{k})
gradient_{k}: {floats} = aten.mul.Tensor(local_{k}, mask_{k})
"""


def drawing(*devices: str, tag: str = "") -> remat.JointGraph:
    """Dropout on each device."""
    given = [
        {
            "k": k,
            "floats": f'f32[64, 64](device="{device}")',
            "mask": f'b8[64, 64](device="{device}")',
            "tag": tag and f", {tag}",
        }
        for k, device in enumerate(devices, 1)
    ]
    parts = [part.format(**names) for part in (INPUTS, FORWARD, BACKWARD) for names in given]
    returned = [f"forward(exp_{d['k']})" for d in given]
    returned += [f"backward(gradient_{d['k']})" for d in given]
    head = f'joint("drawing", version=1, device="cpu", lower="eager", num_fwd_outputs={len(devices)})\n'
    return parse_joint(f"{head}{''.join(parts)}return ({', '.join(returned)},)\n")


@pytest.mark.parametrize(
    ("devices", "tag", "again"),
    [
        (["cpu"], "", ["cpu"]),
        (["cuda:0"], "", ["cuda:0"]),
        (["cpu", "cuda:0"], "", ["cpu", "cuda:0"]),
        # PyTorch would save and restore the state of the current accelerator for all of them.
        (["cuda:0", "cuda:1"], "", []),
        (["cuda:0", "cpu", "cuda:1"], "", ["cpu"]),
        # Not even if a tag asks for it.
        (["cuda:0"], "must_recompute", ["cuda:0"]),
        (["cuda:0", "cuda:1"], "must_recompute", []),
        # The state of this device's generator cannot be saved.
        (["mps"], "", []),
    ],
    ids=str,
)
def test_draws_are_replayed_on_devices_with_one_generator(
    devices: list[str], tag: str, again: list[str]
) -> None:
    joint = drawing(*devices, tag=tag)
    with config.patch(graphsafe_rng_functionalization=False):  # it needs the devices themselves
        plan = remat.plan(joint, 0)
    drawn = [node(joint, name) for name in plan.recomputed if name.startswith("dropped")]
    assert [str(n.meta["val"].device) for n in drawn] == again
