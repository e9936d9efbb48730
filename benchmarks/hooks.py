"""What saved-tensor hooks save on a training step of a small Llama, and what they cost in accuracy.

The step is compiled with ``torch.compile(backend="remat")``, the graphs run as they are: without hooks, and with every
ready-made pair. Saved bytes and simulated peaks are the plan's; peaks are measured by following every storage until it is
freed (``remat.running.measure``); the gradient's error is the norm of the difference of all gradients together, relative to their
norm without hooks.

The side ``float8 by PyTorch`` gives the same pair to PyTorch instead (``torch.autograd.graph.saved_tensors_hooks`` with graph
modules), which inlines it at the end of forward and at the start of backward; its peak holds every saved tensor unpacked.

``cpu-offload`` is not measured here: on a CPU everything is in the host's memory already, and the pair declines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import above
from benchmarks.workloads import text
from remat.passes.packing.pairs import pack_float8, unpack_float8
from remat.running.measure import measure_step
from tests.models import Outcome, Step

#: What the float8 pair may leave of the saved bytes, and how far from the simulated fall of the
#: peak the measured one may be.
LIMITS = {"share": 0.3, "off": 0.02}
SIDES = ("none", "bf16", "int8", "float8", "float8 by PyTorch")


def llama(*, quick: bool) -> Step:
    """A Llama with random weights whose activations outweigh its parameters."""
    width, batch, seq = (64, 4, 64) if quick else (256, 8, 128)
    work = text(
        "llama", batch, seq, vocab_size=1024, hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=2 if quick else 4, num_attention_heads=width // 32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kwargs = work.batch()
        model = work.model().train()
    return Step(model=model, kwargs=kwargs, loss=lambda out: out.loss)


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    step = llama(quick=quick)
    plain: dict[float | None, Outcome] = {}
    for case in cases:
        torch._dynamo.reset()
        hooks, _, by_pytorch = case.side.partition(" by ")
        options: dict[str, Any] = {"budget": case.budget, "lower": "eager"}
        if hooks != "none" and not by_pytorch:
            options["hooks"] = hooks
        compiled: Any = torch.compile(step.model, backend="remat", options=options)
        run = within_pytorchs_hooks(compiled) if by_pytorch else compiled
        outcome = step.train(run)
        resident = [*step.model.parameters(), *step.model.buffers()]
        peak = measure_step(run, step.args, step.kwargs, resident=resident).peak_bytes
        plan = remat.plans()[-1]
        yield case.row(
            saved=0 if by_pytorch else plan.saved_bytes,
            simulated=0 if by_pytorch else plan.peak_bytes,
            measured=peak,
            error=outcome.gradient_distance(plain.setdefault(case.budget, outcome)),
        )


@fx.wrap  # type: ignore[untyped-decorator]
def leaf_pack(x: torch.Tensor) -> Any:
    return pack_float8(x)


@fx.wrap  # type: ignore[untyped-decorator]
def leaf_unpack(packed: Any) -> Any:
    return packed if isinstance(packed, torch.Tensor) else unpack_float8(packed)


def within_pytorchs_hooks(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls with the float8 pair as PyTorch takes it for inlining."""
    pack = fx.symbolic_trace(lambda x: leaf_pack(x))
    unpack = fx.symbolic_trace(lambda packed: leaf_unpack(packed))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return compiled(*args, **kwargs)

    return run


def summarise(rows: list[Row]) -> Row:
    plain = {row["budget"]: row for row in rows if row["side"] == "none"}
    off, shares = [], []
    for row in rows:
        of = plain[row["budget"]]
        if row is not of and "by" not in row["side"]:
            simulated, measured = (of[key] - row[key] for key in ("simulated", "measured"))
            off.append(abs(measured / simulated - 1) if simulated else float("inf"))
        if (row["side"], row["budget"]) == ("float8", 1):
            shares.append(row["saved"] / of["saved"])
    return {"limits": LIMITS, "share": max(shares), "off": max(off)}


EXPERIMENTS = {
    "hooks": Experiment(
        about="saved-tensor hooks on a Llama: bytes, peaks, error of the gradients",
        cases=grid(("llama",), (1, 0.5), SIDES),
        quick=grid(("llama",), (1,), SIDES),
        measure=measure,
        summarise=summarise,
        missed=lambda summary: above(summary, LIMITS),
    ),
}
