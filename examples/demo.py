"""The demo: plan a Llama's training step, let the solvers compete, compile, run, check.

Everything is real but small: a `transformers` Llama on the CPU, one step of forward and backward.
The exit code is 0 only if the compiled step agrees with eager PyTorch.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
import warnings
from typing import Any

import torch
from models import llama
from rich.console import Console
from rich.rule import Rule
from torch import nn

import remat
from remat.cli.tables import LEGEND, comparison_table, plan_table
from remat.units import format_bytes

TOLERANCE = 1e-4


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="layers of the Llama (4)")
    parser.add_argument("--hidden", type=int, default=256, help="its width (256)")
    parser.add_argument("--seq", type=int, default=256, help="tokens of each of 4 texts (256)")
    parser.add_argument("--budget", type=float, default=0.3, help="share of the activations (0.3)")
    parser.add_argument(
        "--lower",
        choices=("inductor", "eager"),
        default="inductor" if has_compiler() else "eager",
        help="inductor where there is a C++ compiler, else eager",
    )
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # of libraries; the demo is for reading
    logging.disable(logging.WARNING)
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if asked.lower == "eager":
        out.print("(no Inductor in this run: the planned graphs run as they are)")

    size = {"layers": asked.layers, "hidden": asked.hidden, "seq": asked.seq}
    model, args, kwargs = llama(device="cpu", **size)
    count = sum(p.numel() for p in model.parameters())

    out.print(Rule("1  Capture the training step", align="left"))
    start = time.perf_counter()
    joint = remat.capture(model, args, kwargs, lower=asked.lower)
    out.print(
        f"LlamaForCausalLM, {asked.layers} layers, {count / 1e6:.1f} M parameters: forward and "
        f"backward are one graph of {len(joint.graph.nodes):,} nodes, traced in "
        f"{time.perf_counter() - start:.1f} s\nwithout computing a number.\n"
    )

    out.print(Rule(f"2  Plan it at {asked.budget} of the activations", align="left"))
    out.print(plan_table(remat.plan(joint, budget=asked.budget), ""))
    out.print()

    out.print(Rule("3  Let every solver compete, scored by one yardstick", align="left"))
    comparison = remat.compare(joint, budgets=(0.1, asked.budget, 0.6))
    out.print(comparison_table(comparison, ""))
    out.print("\n".join(LEGEND) + "\n")

    out.print(Rule("4  Compile it, run one step, compare with eager PyTorch", align="left"))
    worst = run(out, model, kwargs, budget=asked.budget, lower=asked.lower)
    if not worst <= TOLERANCE:
        out.print(
            f"\nThe step differs from eager by {worst:.1e} > {TOLERANCE:g}.", style="bold red"
        )
        return 1
    out.print(f"\nThe step agrees with eager PyTorch: {worst:.1e} ≤ {TOLERANCE:g}.")
    return 0


def run(
    out: Console, model: nn.Module, kwargs: dict[str, Any], *, budget: float, lower: str
) -> float:
    """Runs one step eagerly and one compiled at two budgets; the greatest relative difference."""
    eager_bytes, loss, grads = step(model, model, kwargs)
    held = {"eager PyTorch": (eager_bytes, None)}
    worst = 0.0
    for share in (1.0, budget):
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend="remat", options={"budget": share, "solver": "auto", "lower": lower}
        )
        start = time.perf_counter()
        nbytes, own_loss, own_grads = step(model, compiled, kwargs)
        held[f"remat, budget {share:g}"] = (nbytes, remat.plans()[-1].saved_bytes)
        out.print(f"compiled and run at budget {share:g} in {time.perf_counter() - start:.1f} s")
        absolute = {"loss": (own_loss - loss).abs().item()}
        relative = {"loss": absolute["loss"] / loss.abs().item()}
        absolute["gradients"] = max((own_grads[k] - g).abs().max().item() for k, g in grads.items())
        relative["gradients"] = max(
            ((own_grads[k] - g).norm() / g.norm().clamp_min(1e-30)).item() for k, g in grads.items()
        )
        for name, value in absolute.items():
            out.print(
                f"  greatest difference of {name:9} {value:.1e} absolute, {relative[name]:.1e} relative"
            )
        worst = max(worst, *relative.values())
    out.print("\nheld from forward to backward, beyond inputs, outputs and parameters:")
    for name, (nbytes, planned) in held.items():
        note = "" if planned is None else f"   planned: {format_bytes(planned)}"
        share = f"{nbytes / eager_bytes:6.1%} of eager" if eager_bytes else ""
        out.print(f"  {name:18} {format_bytes(nbytes):>9}  {share}{note}")
    return worst


def step(
    model: nn.Module, call: Any, kwargs: dict[str, Any]
) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """One step: the bytes that autograd holds between forward and backward, loss, gradients."""
    model.zero_grad()
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    known |= {t.untyped_storage().data_ptr() for t in kwargs.values()}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call(**kwargs)
    held.pop(result.logits.untyped_storage().data_ptr(), None)
    held.pop(result.loss.untyped_storage().data_ptr(), None)
    result.loss.backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return sum(held.values()), result.loss.detach().clone(), grads


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler here."""
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl")))


if __name__ == "__main__":
    sys.exit(main())
