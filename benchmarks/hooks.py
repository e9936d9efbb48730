"""What saved-tensor hooks save on a training step of a small Llama, and what they cost in accuracy.

    python benchmarks/hooks.py [--quick] [--output FILE]

The step is compiled with ``torch.compile(backend="remat")``, the graphs run as they are, once without
hooks and once with every ready-made pair. Saved bytes and simulated peaks are the plan's; peaks are
measured by following every storage until it is freed (``remat.running.measure``); the gradient's error
is the norm of the difference of all gradients together, relative to their norm without hooks.

For comparison, the same plan with the float8 pair given to PyTorch instead, which inlines it at the
end of forward and at the start of backward (``torch.autograd.graph.saved_tensors_hooks`` with graph
modules), so that its peak holds every saved tensor unpacked.

``cpu-offload`` needs a GPU: on a CPU everything is in the host's memory already, and the pair declines.
It is not measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from benchmarks.machine import header
from benchmarks.models import Outcome, Step
from remat.passes.packing.pairs import pack_float8, unpack_float8
from remat.running.measure import measure_step
from remat.units import format_bytes

#: What the float8 pair may leave of the saved bytes, and how far from the simulated fall of the
#: peak the measured one may be.
SHARE, OFF = 0.3, 0.02
PAIRS = ("bf16", "int8", "float8")
RESULTS = Path(__file__).parent / "results" / "hooks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pair of hooks at one budget; all in bytes, but for the last.

    Attributes:
        hooks: name of the pair; empty without hooks.
        by: who inlined them, ``"remat"`` or ``"pytorch"``.
        budget: the budget of the plan.
        saved: what forward saves for backward.
        simulated: simulated peak of the step; 0 where PyTorch changed the graphs afterwards.
        measured: measured peak of the step.
        error: relative error of the gradients against the same plan without hooks.
    """

    hooks: str
    by: str
    budget: float
    saved: int
    simulated: int
    measured: int
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two narrow layers, budget 1")
    parser.add_argument("--output", type=Path, default=None, help=f"JSON file (default {RESULTS})")
    given = parser.parse_args()
    output = given.output or (RESULTS.with_suffix(".quick.json") if given.quick else RESULTS)
    console = Console(width=None if sys.stdout.isatty() else 120)
    start = time.perf_counter()
    rows: list[Row] = []
    for budget in (1,) if given.quick else (1, 0.5):
        with console.status(f"budget {budget}"):
            rows += measure(budget, quick=given.quick)
    console.print(table(rows))
    found = report(rows, time.perf_counter() - start)
    console.print(
        f"float8 leaves {found['share']:.4f} of the saved bytes; the measured peak falls by what was "
        f"simulated, off by at most {found['off']:.4%}",
        highlight=False,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"written to {output}")
    if found["share"] > SHARE or found["off"] > OFF:
        raise SystemExit(1)


def llama(*, quick: bool) -> Step:
    """A Llama with random weights whose activations outweigh its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 64 if quick else 256
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=2 if quick else 4,
        num_attention_heads=width // 32,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (4, 64) if quick else (8, 128))
        model = LlamaForCausalLM(config).train()
    return Step(model=model, kwargs={"input_ids": ids, "labels": ids}, loss=lambda out: out.loss)


def measure(budget: float, *, quick: bool) -> Iterator[Row]:
    step = llama(quick=quick)
    plain: Outcome | None = None
    for hooks, by in (("", "remat"), *((p, "remat") for p in PAIRS), ("float8", "pytorch")):
        torch._dynamo.reset()
        options: dict[str, Any] = {"budget": budget, "lower": "eager"}
        if hooks and by == "remat":
            options["hooks"] = hooks
        compiled: Any = torch.compile(step.model, backend="remat", options=options)
        run = within_pytorchs_hooks(compiled) if by == "pytorch" else compiled
        outcome = step.train(run)
        plain = plain or outcome
        resident = [*step.model.parameters(), *step.model.buffers()]
        peak = measure_step(run, step.args, step.kwargs, resident=resident).peak_bytes
        plan = remat.plans()[-1]
        yield Row(
            hooks=hooks,
            by=by,
            budget=budget,
            saved=plan.saved_bytes if by == "remat" else 0,
            simulated=plan.peak_bytes if by == "remat" else 0,
            measured=peak,
            error=outcome.gradient_distance(plain),
        )


@fx.wrap  # type: ignore[untyped-decorator]
def leaf_pack(x: torch.Tensor) -> Any:
    return pack_float8(x)


@fx.wrap  # type: ignore[untyped-decorator]
def leaf_unpack(packed: Any) -> Any:
    return packed if isinstance(packed, torch.Tensor) else unpack_float8(packed)


def within_pytorchs_hooks(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls with the float8 pair as PyTorch takes it for inlining."""
    pair = fx.symbolic_trace(leaf_pack_all), fx.symbolic_trace(leaf_unpack_all)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(*pair):
            return compiled(*args, **kwargs)

    return run


def leaf_pack_all(x: torch.Tensor) -> Any:
    return leaf_pack(x)


def leaf_unpack_all(packed: Any) -> Any:
    return leaf_unpack(packed)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(
        title="Saved-tensor hooks on a Llama step: peaks simulated / measured", title_justify="left"
    )
    for head in ("budget", "hooks", "saved", "share", "peak", "falls by", "gradient error"):
        shown.add_column(head, justify="left" if head == "hooks" else "right", no_wrap=True)
    for row in rows:
        plain = plain_of(row, rows)
        ours = row.by == "remat"
        falls = (1 - row.simulated / plain.simulated, 1 - row.measured / plain.measured)
        shown.add_row(
            str(row.budget),
            (row.hooks or "none") + ("" if ours else ", inlined by PyTorch"),
            format_bytes(row.saved) if ours else "",
            f"{row.saved / plain.saved:.3f}" if ours else "",
            f"{format_bytes(row.simulated) if ours else '–'} / {format_bytes(row.measured)}",
            f"{f'{falls[0]:.2%}' if ours else '–'} / {falls[1]:.2%}",
            f"{row.error:.2e}",
        )
    return shown


def plain_of(row: Row, rows: Sequence[Row]) -> Row:
    """The same plan without hooks."""
    return next(r for r in rows if not r.hooks and r.budget == row.budget)


def report(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    off = 0.0
    for row in rows:
        plain = plain_of(row, rows)
        if row.hooks and row.by == "remat":
            simulated, measured = plain.simulated - row.simulated, plain.measured - row.measured
            off = max(off, abs(measured / simulated - 1) if simulated else math.inf)
    ours = [r for r in rows if r.hooks == "float8" and r.by == "remat" and r.budget == 1]
    return {
        **header("hooks"),
        "elapsed_s": round(seconds, 1),
        "limits": {"share": SHARE, "off": OFF},
        "share": max(r.saved / plain_of(r, rows).saved for r in ours),
        "off": off,
        "rows": [asdict(r) for r in rows],
    }


if __name__ == "__main__":
    main()
