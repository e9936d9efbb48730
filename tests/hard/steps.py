"""One training step of a small program, in eager PyTorch and on plans, and all it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

import remat

#: A program with what it is called with, made anew for each step: a step may overwrite its inputs.
Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]

#: Fuzz tests draw those in between.
BUDGETS = (0, 1)


def drawn(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that are the same in every step for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + 7 * grad)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and a weight, both differentiated."""
    return drawn(6, 8), drawn(8, 8)


def step(f: Callable[..., Any], args: Sequence[Any], model: Any = None) -> dict[str, Any]:
    """Runs forward and backward from a seed.

    Returns:
        Everything the step leaves behind, by name: outputs, gradients, inputs and buffers as they
        were left, and the state of the generator.
    """
    if isinstance(model, nn.Module):
        model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    given = pytree.tree_leaves(tuple(args))
    out = pytree.tree_leaves(f(*args))
    losses = [
        _loss(o, k) for k, o in enumerate(out) if isinstance(o, torch.Tensor) and o.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()
    left = {f"output {k}": o for k, o in enumerate(out)}
    left |= {f"input {k}": v for k, v in enumerate(given)}
    left |= {
        f"gradient of input {k}": v.grad
        for k, v in enumerate(given)
        if isinstance(v, torch.Tensor) and v.is_leaf
    }
    if isinstance(model, nn.Module):
        left |= {f"gradient of {k}": p.grad for k, p in model.named_parameters()}
        left |= {f"buffer {k}": b for k, b in model.named_buffers()}
    left["random state"] = torch.get_rng_state()
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in left.items()}


def _loss(output: torch.Tensor, k: int) -> torch.Tensor:
    """A scalar whose gradient differs from element to element."""
    flat = output.abs().reshape(-1) if output.is_complex() else output.reshape(-1)
    weight = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) + k)
    return (flat.double() * weight).sum()


def compiled(f: Any, *, lower: str = "eager", how: Any = None, **options: Any) -> Any:
    """The program on plans of ours; a graph break is an error unless ``how`` allows it."""
    if lower == "inductor":
        options["fallback_random"] = True
    options = {"lower": lower, **options}
    return torch.compile(f, backend="remat", options=options, **{"fullgraph": True, **(how or {})})


def check(
    make: Make,
    *,
    budgets: Sequence[float | remat.Peak] | None = None,
    lower: str = "eager",
    plans: int = 1,
    captured: bool = False,
    **how: Any,
) -> list[remat.Plan]:
    """Runs a step at every budget and compares all it leaves behind with eager PyTorch.

    Args:
        make: makes the program.
        budgets: the budgets; by default the least and all, and the least under Inductor.
        lower: the lowering.
        plans: how many graphs must have been planned at each budget.
        captured: the first step runs on the plan of a graph that was captured by itself.
        how: options of ``torch.compile``.

    Returns:
        The plans of all budgets, in their order.
    """
    f, args = make()
    expected = step(f, args, f)
    inductor = lower == "inductor"
    budgets = budgets or ((0,) if inductor else BUDGETS)
    asked: list[dict[str, Any]] = [{"budget": b} for b in budgets]
    if captured:
        torch._dynamo.reset()
        f, args = make()
        with inductor_config.patch(fallback_random=True):  # as `compiled` has it
            joint = remat.capture(f, args, lower=lower, dynamic=how.get("dynamic", False))
        asked[0] = {"plan": remat.plan(joint, budgets[0])}
    made: list[remat.Plan] = []
    for options in asked:
        torch._dynamo.reset()
        before = len(remat.plans())
        f, args = make()
        left = step(compiled(f, lower=lower, how=how, **options), args, f)
        assert_same(left, expected, 1e-4 if inductor else 1e-5)
        new = remat.plans()[before:]
        assert len(new) == plans, f"{options}: planned graphs"
        assert all(p.saved_bytes <= p.capacity and p.explain() for p in new)
        made += new
    return made


def assert_same(left: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compares what two steps left behind; generator states to the bit."""
    assert left.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert left[name] == value, name
            continue
        exact = tolerance if value.dtype.is_floating_point or value.is_complex() else 0.0

        def told(text: str, name: str = name) -> str:
            return f"{name}: {text}"

        torch.testing.assert_close(left[name], value, rtol=exact, atol=exact, msg=told)
