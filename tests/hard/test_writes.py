"""Graphs in which operators write in place: to what the step makes itself, and with `set_`.

AOTAutograd makes functions of most writes; what is left are writes to inputs behind everything else,
and every write where it is told not to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch.nn import functional as F

import remat
from tests.hard.steps import assert_same, drawn, step

T = torch.Tensor
Program = Callable[[T, T, T], T]


def set_to_a_fresh_tensor(x: T, w: T, b: T) -> T:
    with torch.no_grad():
        b.set_(torch.full((8, 8), 2.0))
    return torch.sin(torch.sin(x @ w) * b) @ w + b


def set_to_what_is_read_again(x: T, w: T, b: T) -> T:
    h = torch.sin(x @ w)
    c = torch.cos(h)
    with torch.no_grad():
        b.set_(c.detach())
    return torch.sin(torch.sin(h * b) @ c.t())


def set_and_overwritten(x: T, w: T, b: T) -> T:
    h = torch.sin(x @ w)
    with torch.no_grad():
        b.set_(torch.cos(h.detach()))
        b.mul_(2)
    return torch.sin(torch.sin(h + b) @ w)


def set_of_an_intermediate(x: T, w: T, b: T) -> T:
    t, h = torch.zeros(8, 8), torch.sin(x @ w)
    before = t[1]
    with torch.no_grad():
        t.set_(torch.exp(b))
        t.mul_(2)
    return torch.sin(torch.sin(h * t) @ w) + before


def a_list(x: T, w: T, b: T) -> T:
    h = torch.sin(x @ w)
    made = [h * 2, torch.cos(h) * 3]
    torch._foreach_mul_(made, 2.0)
    return torch.sin((torch.sin(made[0]) + torch.cos(made[1])) @ w)


def a_list_of_inputs(x: T, w: T, b: T) -> T:
    early = torch.exp(b * b)
    torch._foreach_add_([b], [b])
    return torch.sin((x @ w) * b) * early


def read_before_and_after(x: T, w: T, b: T) -> T:
    h = b * 3
    early, view = torch.exp(torch.cos(h)), h[:4]
    h.mul_(2)
    return torch.sin(early @ w) * torch.sin(h @ w) * torch.sin(view @ w).sum(0)


def by_another_name(x: T, w: T, b: T) -> T:
    made = torch.zeros_like(x)
    made.copy_(torch.sin(x @ w))
    made.index_put_((torch.tensor([0, 2]),), torch.cos(x[:2]))
    with torch.no_grad():
        out = torch.empty(8, 8)
        torch.sin(b, out=out)
        kept = out.clone()
        torch.cos(b, out=out)
    return torch.sin(made @ w) * out * kept


PROGRAMS = [
    set_to_a_fresh_tensor,
    set_to_what_is_read_again,
    set_and_overwritten,
    set_of_an_intermediate,
    a_list,
    a_list_of_inputs,
    read_before_and_after,
    by_another_name,
]


def given() -> tuple[T, T, T]:
    return drawn(8, 8), drawn(8, 8), drawn(8, 8, grad=False)


def compiled(f: Any, budget: float, *, functional: bool) -> Any:
    def as_it_is(module: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    return aot_function(
        f,
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=remat.partitioner(budget, repro=False),
        keep_inference_input_mutations=True,
        disable_functionalization=not functional,
    )


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "in-place"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_eager(program: Program, functional: bool) -> None:
    expected = step(program, given())
    for budget in (0, 1):
        assert_same(step(compiled(program, budget, functional=functional), given()), expected)


def test_drawn_programs() -> None:
    """Programs that write at random; what eager autograd refuses counts for nothing."""
    ran = 0
    for seed in range(7):
        program = drawn_program(seed)
        try:
            expected = step(program, given())
        except RuntimeError:
            continue
        ran += 1
        assert_same(step(compiled(program, 0.2, functional=False), given()), expected, 1e-4)
    assert ran >= 3


def drawn_program(seed: int) -> Program:
    choose = random.Random(seed)
    kinds = ["sin", "sin", "sin", "mm", "mm", "mul_", "add_", "foreach", "copy_", "set_", "view"]
    lines = [(choose.choice(kinds), choose.random(), choose.random()) for _ in range(6)]

    def program(x: T, w: T, b: T) -> T:
        values = [x * 1.0, torch.sin(x @ w), b]
        for kind, one, other in lines:
            u, v = values[int(one * len(values))], values[int(other * len(values))]
            if kind == "sin":
                values.append(torch.sin(u) * v)
            elif kind == "mm":
                values.append(torch.tanh(u @ w))
            elif kind == "mul_":
                u.mul_(v)
            elif kind == "add_":
                u.add_(v.detach())
            elif kind == "foreach":
                torch._foreach_mul_([u], 1.5)
            elif kind == "copy_":
                u.copy_(v)
            elif kind == "view":
                values.append(u.view(4, 16).view(8, 8))
            else:
                with torch.no_grad():
                    values.append(torch.empty(0).set_(v.detach()))
        return torch.stack([torch.tanh(v) @ w for v in values]).sum(0)

    return program


def test_memory_that_only_backward_writes_to_may_be_allocated_there() -> None:
    """The gradient of an affine grid is put together in memory that is read nowhere else."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1).double()

    def warped(x: T) -> T:
        h = convolution(x).sin()
        theta = h.mean((2, 3))[:, :6].view(-1, 2, 3)
        grid = F.affine_grid(theta, [2, 8, 8, 8], align_corners=False)
        sampled = F.grid_sample(h, grid, align_corners=False)
        pooled, places = F.max_pool2d(sampled, 2, return_indices=True)
        return F.max_unpool2d(pooled.exp(), places, 2).exp().sin()

    def gradients(f: Callable[[T], T]) -> list[T | None]:
        convolution.zero_grad()
        x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1)).double()
        f(x.requires_grad_()).sum().backward()
        return [x.grad, *(p.grad for p in convolution.parameters())]

    # Priced for another device: on this one the convolution's workspace is the peak, whatever the order.
    options = {"budget": remat.Peak(0.0), "lower": "eager", "cost": "roofline:h100"}
    found = gradients(torch.compile(warped, backend="remat", options=options))
    assert "empty" in remat.plans()[-1].backward_order
    torch.testing.assert_close(found, gradients(warped))
