"""Selective checkpointing of real steps: what is estimated, what is measured, and PyTorch's program beside it.

    python benchmarks/sac.py [--quick] [--only models|program] [--layers N] [--output FILE]

Models of ``transformers`` with random weights run on the CPU. For each and each budget, a share of the
step's peak:

- activation bytes at the end of forward, and the peak, estimated and measured by following every storage
  until it is freed; with the plan applied by `remat.sac.apply`;
- the time that running again takes: estimated in steps in which each module runs again or stores all
  (``operator-level-benchmark``), and measured in backward under the plan, the median of some steps;
- whether gradients are those of the same step without a plan, bit by bit;
- PyTorch's ``sac_milp`` on the same statistics, with the two segments of our envelope for each module
  (PyTorch's needs the package ``pwlf`` to fit its own). What it decides, a fraction of memory for each
  module, is turned into operators by PyTorch's ``get_optimal_checkpointing_policy_per_module`` and
  simulated like ours: whether it stays within the budget, what it recomputes, and how long both took.
  Its time does not include that second step; ours includes it. PyTorch's stops at a gap of 5 %: ours
  is timed with that gap, and with its own of 0.5 %.

The C library is told to keep the memory that it has, as allocators for training do: else a good part
of what is measured is the system clearing pages, now more of them and now fewer.

PyTorch's ``SACEstimator`` is tried as well, and what it says is noted.

Then the program alone, for a Llama of many layers on fake tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import header
from benchmarks.torch_sac import Theirs, estimator_says, their_plan
from remat.checkpointing import estimate, plan
from remat.errors import BudgetError
from remat.running.measure import StorageTracker, as_before, measure_step, run_backward, run_forward
from remat.sac import SACPlan, apply, remove
from remat.sac.estimation.modules import ModuleTree
from remat.sac.run.lifetimes import loss_only
from remat.sac.run.operators import tensors_in
from remat.sac.solve.step_plot import simulate_plan

#: How far estimates may be off: activation bytes and recompute time.
BYTES_OFF, TIME_OFF = 0.03, 0.15
SHARES = (0.85, 0.7)
REPEATS = 15
#: The gap at which PyTorch's program stops.
THEIR_GAP = 0.05
RESULTS = Path(__file__).parent / "results" / "sac.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model under one budget. Bytes and milliseconds.

    Attributes:
        model: its name.
        share: the budget as a share of the peak without checkpointing.
        budget: the same in bytes.
        modules: how many modules are checkpointed.
        activations: bytes at the end of forward, without parameters, buffers and inputs; estimated
            and measured.
        peak: the same for the peak of the step, parameters included.
        again_ms: time that running again takes, estimated and measured.
        equal: whether all gradients are bit-equal.
        solve_s: how long the program took, choices within modules included, with PyTorch's gap, and
            with ours.
        theirs: PyTorch's program on the same statistics.
    """

    model: str
    share: float
    budget: int
    modules: int
    activations: tuple[int, int]
    peak: tuple[int, int]
    again_ms: tuple[float, float]
    equal: bool
    solve_s: tuple[float, float]
    theirs: Theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="Llama alone, one budget, 8 layers")
    parser.add_argument("--layers", type=int, default=80, help="layers of the large program")
    parser.add_argument(
        "--only",
        choices=("models", "program"),
        help="one part; the file keeps what it has of the other",
    )
    parser.add_argument("--output", type=Path, default=None, help=f"JSON file (default {RESULTS})")
    given = parser.parse_args()
    output = given.output or (RESULTS.with_suffix(".quick.json") if given.quick else RESULTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    keep_memory()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(width=None if sys.stdout.isatty() else 170)
    failed = False
    if given.only != "program":
        started = time.perf_counter()
        rows: list[Row] = []
        for name, make in list(MODELS.items())[: 1 if given.quick else None]:
            torch.manual_seed(0)
            model, kwargs = make()
            rows += measure(name, model.train(), kwargs, SHARES[:1] if given.quick else SHARES)
        console.print(table(rows))
        says = estimator_says()
        for mode, said in says.items():
            console.print(f"PyTorch's SACEstimator, {mode}: {said}", highlight=False)
        seconds = round(time.perf_counter() - started, 1)
        limits = {"bytes_off": BYTES_OFF, "time_off": TIME_OFF}
        shown = [asdict(r) for r in rows]
        write(output, elapsed_s=seconds, limits=limits, rows=shown, torch_estimator=says)
        failed = any(not r.equal or off(r.activations) > BYTES_OFF for r in rows)
    if given.only != "models":
        large = program(8 if given.quick else given.layers)
        console.print(json.dumps(large, indent=2), highlight=False)
        write(output, large_program=large)
    console.print(f"written to {output}")
    if failed:
        raise SystemExit(1)


def write(output: Path, **parts: Any) -> None:
    """Writes some parts of the report; those that a file has already stay."""
    before = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps(before | header("sac") | parts, indent=2) + "\n")


def off(pair: tuple[float, float]) -> float:
    """How far what was estimated is from what was measured."""
    estimated, measured = pair
    return abs(estimated / measured - 1) if measured else float(estimated != measured)


def measure(
    name: str, model: nn.Module, kwargs: dict[str, Any], shares: Sequence[float]
) -> Iterator[Row]:
    tree = estimate(model, (), kwargs, mode="operator-level-benchmark")
    eager = gradients(model, kwargs)
    for share in shares:
        try:
            found, solve_s = solved(tree, share)
        except BudgetError as error:
            print(f"{name} at {share}: {error}")
            continue
        held, peak = measured_bytes(model, kwargs, found)
        resident = given_bytes(model, kwargs)
        simulated = simulate_plan(tree, found)
        yield Row(
            model=name,
            share=share,
            budget=found.budget_bytes,
            modules=len(found.modules),
            activations=(int(simulated.memory[tree.forward_end]) - resident, held),
            peak=(found.peak_bytes, peak),
            again_ms=(found.recompute_ms, measured_again(model, kwargs, found)),
            equal=same(eager, gradients(apply(model, found), kwargs)) and bool(remove(model)),
            solve_s=solve_s,
            theirs=their_plan(tree, found.budget_bytes),
        )


def solved(tree: ModuleTree, share: float) -> tuple[SACPlan, tuple[float, float]]:
    """The plan, and seconds for one with PyTorch's gap and for it."""
    import scipy.optimize  # noqa: F401 - as PuLP is imported before theirs is timed

    started = time.perf_counter()
    plan(tree, memory=share, gap=THEIR_GAP)
    between = time.perf_counter()
    found = plan(tree, memory=share)
    return found, (between - started, time.perf_counter() - between)


def keep_memory() -> None:
    """Tells glibc to take memory from its heap only, and to give none back."""
    trim, top_pad, most_mapped = -1, -2, -4
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(most_mapped, 0)
        mallopt(trim, 2**31 - 1)
        mallopt(top_pad, 2**26)


def given_bytes(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Bytes of parameters, buffers and inputs."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(kwargs)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def measured_bytes(model: nn.Module, kwargs: dict[str, Any], found: SACPlan) -> tuple[int, int]:
    """Activation bytes at the end of forward and the peak of the step, both under a plan."""
    apply(model, found)
    step = loss_only(model)
    resident = [*model.parameters(), *model.buffers()]
    try:
        with as_before([*resident, *tensors_in(kwargs)], torch.device("cpu")):
            tracker = StorageTracker()
            for tensor in [*resident, *tensors_in(kwargs)]:
                tracker.add(tensor)
            before = tracker.current
            with tracker:
                result = run_forward(step, (), kwargs)
                held = tracker.current - before
            del result
        peak = measure_step(step, (), kwargs, resident=resident).peak_bytes
    finally:
        remove(model)
    return held, peak


def measured_again(model: nn.Module, kwargs: dict[str, Any], found: SACPlan) -> float:
    """Milliseconds of a step in which modules run again, the median of some steps."""
    spent = [0.0]

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return forward(*args, **named)
            finally:
                if torch._C._current_graph_task_id() != -1:
                    spent[0] += time.perf_counter() - started

        return run

    modules = [model.get_submodule(m.name) for m in found.modules]
    for module in modules:
        module.__dict__["forward"] = timed(module.forward)
    apply(model, found)
    found_ms = []
    for _ in range(REPEATS):
        spent[0] = 0.0
        run_backward(run_forward(loss_only(model), (), kwargs))
        found_ms.append(1e3 * spent[0])
        model.zero_grad(set_to_none=True)
    remove(model)
    for module in modules:
        del module.__dict__["forward"]
    return statistics.median(found_ms)


def gradients(model: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor | None]:
    """Gradients of one step with one seed; statistics in buffers are put back."""
    with as_before([*model.parameters(), *model.buffers()], torch.device("cpu")):
        torch.manual_seed(3)
        run_backward(run_forward(loss_only(model), (), kwargs))
        return [p.grad for p in model.parameters()]


def same(a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> bool:
    return all(
        x is y or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def program(layers: int) -> dict[str, Any]:
    """The program alone, for a Llama of many layers."""
    with torch.device("meta"):
        model, kwargs = llama(layers)
    tree: ModuleTree = estimate(model.train(), (), kwargs)
    found = []
    for share in (0.8, 0.5, 0.4):
        ours, solve_s = solved(tree, share)
        found.append(
            {
                "share": share,
                "budget": ours.budget_bytes,
                "peak": ours.peak_bytes,
                "recompute_ms": ours.recompute_ms,
                "bound_ms": ours.bound_ms,
                "solve_s": solve_s,
                "theirs": asdict(their_plan(tree, ours.budget_bytes)),
            }
        )
    return {"layers": layers, "modules": len(tree.modules), "budgets": found}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(
        title="Selective checkpointing: estimated / measured; ours / PyTorch's",
        title_justify="left",
    )
    heads = ("model", "budget", "activations off", "peak off", "again, ms", "off", "gradients",
             "recompute, ms", "fits", "solved, s: gap 5 %, 0.5 % / 5 %")  # fmt: skip
    for head in heads:
        shown.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    for r in rows:
        t = r.theirs
        shown.add_row(
            r.model,
            f"{r.share:g}",
            f"{off(r.activations):.2%}",
            f"{off(r.peak):.2%}",
            f"{r.again_ms[0]:.2f} / {r.again_ms[1]:.2f}",
            f"{off(r.again_ms):.1%}",
            "equal" if r.equal else "differ",
            f"{r.again_ms[0]:.2f} / {t.recompute_ms:.2f}"
            if t.found
            else f"{r.again_ms[0]:.2f} / –",
            f"yes / {'yes' if t.fits else 'no'}" if t.found else "yes / none found",
            f"{r.solve_s[0]:.2f}, {r.solve_s[1]:.2f} / {t.solve_s:.2f}",
        )
    return shown


Made = tuple[nn.Module, dict[str, Any]]


def llama(layers: int = 4) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=384, intermediate_size=1056, num_hidden_layers=layers,
        num_attention_heads=6, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 512, (4, 256))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=512, n_embd=384, n_layer=4, n_head=6, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    ids = torch.randint(0, 512, (4, 256))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, intermediate_size=1056, num_hidden_layers=4, num_attention_heads=6,
        image_size=128, patch_size=8, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    labels = torch.randint(0, 10, (4,))
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 128, 128), "labels": labels,
    }  # fmt: skip


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=384, d_kv=64, d_ff=1056, num_layers=3, num_heads=6, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 512, (4, 192))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 192], depths=[2, 2, 2], num_labels=10,
    )  # fmt: skip
    labels = torch.randint(0, 10, (16,))
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(16, 3, 128, 128), "labels": labels,
    }  # fmt: skip


MODELS: dict[str, Callable[[], Made]] = {
    "Llama": llama,
    "GPT-2 with dropout": gpt2,
    "ViT": vit,
    "T5": t5,
    "ResNet": resnet,
}

if __name__ == "__main__":
    main()
