"""Does backward branch as forward did, at every budget, and what does that cost?

Routers send each token to one of 16 experts, whose rows in the router's weight are nearly equal, so that many tokens are near a
tie. A table with a row for each expert is read by the chosen row, and its gradient in float32 counts the tokens that backward
sends there, by groups of tokens. *Flips* are tokens that backward counts elsewhere than forward, *moved* are tokens that forward sends
elsewhere than at budget 1.

Models of ``transformers`` and nets without a table have gradients alone: ``gradient_off`` is their distance from those of budget 1.
``step_ms`` is the least time of some steps. The side names type and lowering.

``branch-price`` plans real architectures twice: with the constraint that branch values must not run again (``kept``), and without
(``free``). Both plans have the same bytes, those that the budget stands for with the constraint. Budget 0 asks for the least saved
bytes.

``branch-rounding`` times steps in bfloat16 in turns: with each 16-bit result rounded, and without. ``ratio`` is the median of the
ratios within rounds; the side ``again`` is the spread of the measurement. Nets without branch values have plain Inductor beside them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.figures import geometric_mean, ratio_of
from benchmarks.plans import COST
from benchmarks.quality import FLOOR
from benchmarks.workloads import COMPILED, captured
from remat.graph import verify
from remat.graph.branch_values import FixedBranches
from remat.graph.problems import lowering
from remat.graph.rules.runs import branches_are_forwards

BUDGETS = (1, 0.5, 0.3, 0, "peak:0.3", "peak:0")
TYPES = ("bfloat16", "float16", "float32")
LOWERINGS = ("inductor", "eager")
TOKENS, WIDTH, EXPERTS, GROUPS = 4096, 64, 16, 64

#: The expert of each token, from its scores.
RANKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": lambda z: z.topk(1, -1).indices[:, 0],
    "argmax": lambda z: z.argmax(-1),
    "sort": lambda z: z.sort(-1, descending=True).indices[:, 0],
    "ranks": lambda z: ((z[:, :, None] < z[:, None]).sum(-1) == 0).long().argmax(-1),
}


class Layer(nn.Module):
    """Normalisation, a gated linear layer, scaling, and a router over experts that are nearly equal."""

    def __init__(self, rank: Callable[[torch.Tensor], torch.Tensor], bias: bool) -> None:
        super().__init__()
        self.rank = rank
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        rows = torch.randn(1, WIDTH) * 0.2 + torch.randn(EXPERTS, WIDTH) * 2e-3
        self.router = nn.Parameter(rows)
        self.bias = nn.Parameter(torch.randn(EXPERTS) * 1e-3) if bias else None
        self.table = nn.Parameter(torch.zeros(EXPERTS, GROUPS))
        self.register_buffer("groups", torch.eye(GROUPS).repeat(TOKENS // GROUPS, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm
        a, b = self.up(h).chunk(2, -1)
        h = nn.functional.silu(a) * b * 0.37
        scores = (h @ self.router.t()).softmax(-1)
        expert = self.rank(scores if self.bias is None else scores + self.bias)
        counted = (self.table[expert] * self.groups).sum()
        return x + self.down(h) * scores.gather(-1, expert[:, None]), counted, expert


class Routers(nn.Module):
    """Three layers; returns a loss, and the experts of all tokens."""

    def __init__(self, rank: str, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(RANKS[rank], bias) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted, experts = [], []
        for layer in self.layers:
            x, count, expert = layer(x)
            counted.append(count)
            experts.append(expert)
        return x.float().square().mean() + torch.stack(counted).sum(), torch.stack(experts)

    def flips(self, experts: torch.Tensor) -> int:
        """Tokens that backward counts elsewhere than forward."""
        found = 0
        for layer, chosen in zip(self.layers, experts, strict=True):
            there = nn.functional.one_hot(chosen, EXPERTS).float().t() @ layer.groups  # type: ignore[operator]
            found += int((there - layer.table.grad).abs().sum()) // 2  # type: ignore[operator]
        return found


class Net(nn.Module):
    """A linear layer before and behind what is measured; returns a loss, and what the net chose."""

    def __init__(self, middle: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, chosen = self.middle(nn.functional.silu(self.before(x)) * 0.37)
        return self.behind(y).float().square().mean(), chosen


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A vector quantiser with a straight-through gradient: the nearest of the first rows."""
    book = x[:EXPERTS]
    code = (x[:, None] - book).square().sum(-1).argmin(-1)
    return x + (book[code] - x).detach() + book[code], code


def hashed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LSH attention: tokens are sorted by buckets, and attend within chunks of 64."""
    bucket = torch.cat([x[:, :8], -x[:, :8]], -1).argmax(-1)
    order = bucket.argsort(stable=True)
    chunks = x[order].view(-1, 64, WIDTH)
    y = (chunks @ chunks.mT).softmax(-1) @ chunks
    return y.view(-1, WIDTH)[order.argsort()], bucket


def sparsemax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = x.sort(-1, descending=True).values
    k = torch.arange(1, WIDTH + 1, dtype=x.dtype)
    total = z.cumsum(-1)
    support = (1 + k * z > total).sum(-1, keepdim=True)
    tau = (total.gather(-1, support - 1) - 1) / support.to(x.dtype)
    return (x - tau).clamp(min=0), support


def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = nn.functional.max_pool2d(x.view(64, 64, 8, 8), 2)
    return nn.functional.interpolate(y, scale_factor=2).view(-1, WIDTH), torch.zeros(())


def maximum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = x.softmax(-1)
    return x * z.amax(-1, keepdim=True) + z * (z == z.amax(-1, keepdim=True)), torch.zeros(())


MIDDLES = {
    "quantiser": quantised,
    "lsh": hashed,
    "sparsemax": sparsemax,
    "max-pool": pooled,
    "maxima": maximum,
    "relu": lambda x: (nn.functional.relu(x).sin(), torch.zeros(())),
    "hardtanh": lambda x: (nn.functional.hardtanh(x * 9).sin(), torch.zeros(())),
}
#: Classes of `transformers` whose blocks route tokens.
MODELS: Mapping[str, tuple[str, Row]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "moe_intermediate_size": 128, "head_dim": 32},
    ),
}


class Language(nn.Module):
    """A tiny mixture of experts of `transformers`; returns its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        kind, more = MODELS[name]
        model = getattr(transformers, kind)
        sizes = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "vocab_size": 512,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
        self.model = model(model.config_class(**sizes, **heads, **more))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model(input_ids=ids, labels=ids).loss, torch.zeros(())


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name in MODELS:
        return Language(name).to(dtype), torch.randint(0, 512, (2, 128))
    model: nn.Module
    if name in MIDDLES:
        model = Net(MIDDLES[name])
    else:
        model = Routers(name.removesuffix("-bias"), bias=name.endswith("-bias"))
    for label, p in model.named_parameters():
        p.data = p.data if label.endswith("table") else p.data.to(dtype)
    return model, torch.randn(TOKENS, WIDTH).to(dtype)


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    first: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    for case in cases:
        torch.compiler.reset()
        kind, lower = case.side.split()
        model, given = build(name, getattr(torch, kind))
        options = {"budget": case.budget, "lower": lower}
        compiled = torch.compile(model, backend="remat", options=options)
        try:
            loss, chosen = compiled(given)
        except Exception as error:
            yield case.row(error=str(error).splitlines()[0])
            continue
        loss.backward()
        gradient = torch.cat(
            [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        )
        flips = model.flips(chosen) if isinstance(model, Routers) else 0
        forward, right, value = first.setdefault(case.side, (chosen, gradient, float(loss)))
        plan = remat.plans()[-1]
        yield case.row(
            flips=flips,
            moved=int((chosen != forward).sum()),
            loss_off=abs(float(loss) - value),
            nan=int(gradient.isnan().sum()),
            gradient_off=float((gradient - right).norm() / right.norm()),
            step_ms=fastest(functools.partial(step, compiled, given), 3 if quick else 15),
            saved_bytes=plan.saved_bytes,
            peak_bytes=plan.peak_bytes,
            recompute_cost=plan.recompute_cost,
        )


def step(compiled: Callable[[torch.Tensor], Any], given: torch.Tensor) -> None:
    compiled(given)[0].backward()


def fastest(run: Callable[[], None], repeats: int) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def summarise(rows: list[Row]) -> Row:
    ran = [row for row in rows if "error" not in row]
    return {
        "cells": len(ran),
        "errors": len(rows) - len(ran),
        "flips": sum(row["flips"] for row in ran),
        "moved": sum(row["moved"] for row in ran),
        "nan_cells": sum(row["nan"] > 0 for row in ran),
        "gradient_off": max((row["gradient_off"] for row in ran), default=0.0),
    }


def missed(summary: Row) -> list[str]:
    limits = {"flips": 0, "moved": 0, "nan_cells": 0, "gradient_off": 0.02}
    return [
        f"{name} is {summary[name]}, over {most}"
        for name, most in limits.items()
        if summary[name] > most
    ]


@contextlib.contextmanager
def unconstrained() -> Iterator[None]:
    """Let branch values run again, unverified."""
    rules = [rule for rule in verify.RULES if rule[1] is not branches_are_forwards]
    with (
        mock.patch.object(lowering, "fix_branches", return_value=FixedBranches()),
        mock.patch.object(verify, "RULES", rules),
    ):
        yield


def price(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    """Plan with the constraint and without at the same bytes."""
    moe = COMPILED["moe"]
    joint = remat.capture(moe.build(), (), moe.batches(1)[0]) if name == "moe" else captured(name)
    limits: dict[Any, Any] = {}
    for case in cases:
        of_peak = isinstance(case.budget, str)
        budget: Any = remat.Peak(float(case.budget.split(":")[1])) if of_peak else case.budget
        with unconstrained() if case.side == "free" else contextlib.nullcontext():
            limit = limits.get(case.budget, budget)
            seconds, _, plan = timed(functools.partial(remat.plan, joint, limit, cost=COST))
        if of_peak:
            limits.setdefault(case.budget, remat.Peak(plan.peak_limit))
        elif case.budget > 0:
            limits.setdefault(case.budget, remat.Saved(plan.capacity))
        yield case.row(
            saved_bytes=plan.saved_bytes,
            peak_bytes=plan.peak_bytes,
            cost=plan.recompute_cost,
            step_cost=plan.step_cost,
            full_bytes=plan.full_bytes,
            seconds=seconds,
        )


def summarise_price(rows: list[Row]) -> Row:
    """Multiples of what a plan without the constraint costs, and saves at least."""
    at = {(row["workload"], row["budget"], row["side"]): row for row in rows}
    pairs = [(row, at[(*key, "free")]) for (*key, side), row in at.items() if side == "kept"]
    costs = [ratio_of(a["cost"], b["cost"]) for a, b in pairs if a["budget"] != 0]
    least = [(a, b) for a, b in pairs if a["budget"] == 0]
    return {
        "cells": len(pairs),
        "cost_mean": geometric_mean(costs, FLOOR),
        "cost_worst": max(costs),
        # Without the constraint, some steps need to save nothing.
        "least_bytes_worst": max(
            (a["saved_bytes"] / b["saved_bytes"] for a, b in least if b["saved_bytes"]), default=1.0
        ),
        "least_bytes_more_of_full": max(
            (a["saved_bytes"] - b["saved_bytes"]) / a["full_bytes"] for a, b in least
        ),
    }


def dear(summary: Row) -> list[str]:
    limits = {
        "cost_mean": 1.01,
        "cost_worst": 1.05,
        "least_bytes_more_of_full": 0.05,
    }
    return [
        f"{name} is {summary[name]:.3f}, over {most}"
        for name, most in limits.items()
        if summary[name] > most
    ]


def rounding(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    """Time steps with rounding, and without, in turns."""
    model, given = build(name, torch.bfloat16)
    ways: dict[str, dict[str, Any]] = {
        "off": {"backend": "remat", "options": {"exact_branches": False}},
        "on": {"backend": "remat"},
        "again": {"backend": "remat", "options": {"exact_branches": False}},
        "inductor": {"backend": "inductor"},
    }
    runs = {}
    for side, options in ways.items():
        torch.compiler.reset()
        runs[side] = torch.compile(copy.deepcopy(model), **options)
        step(runs[side], given)
    times: dict[str, list[float]] = {side: [] for side in runs}
    for turn in range(5 if quick else 60):
        for side in [*runs][turn % 4 :] + [*runs][: turn % 4]:
            times[side].append(fastest(functools.partial(step, runs[side], given), 1))
    for case in cases:
        own = times[case.side]
        ratios = [a / b for a, b in zip(own, times["off"], strict=True)]
        yield case.row(step_ms=statistics.median(own), ratio=statistics.median(ratios))


def summarise_rounding(rows: list[Row]) -> Row:
    found: Row = {}
    for kind, names in {"branching": ROUNDED, "without": UNROUNDED}.items():
        for side in ("on", "again", "inductor"):
            own = [r["ratio"] for r in rows if r["workload"] in names and r["side"] == side]
            found[f"{kind} {side}"] = geometric_mean(own)
    return found


ROUNDED, UNROUNDED = ("topk", "argmax", *MODELS, "quantiser", "maxima"), ("relu", "hardtanh")
PRICED = ("moe", "mixtral-8x7b", "vit-huge", "resnet-50", "unet", "gpt2-xl")
WORKLOADS = (*RANKS, "topk-bias", *MODELS, *MIDDLES)
SIDES = tuple(f"{kind} {lower}" for kind in TYPES for lower in LOWERINGS)

EXPERIMENTS = {
    "branch-values": Experiment(
        about="whether backward branches as forward did at every budget",
        cases=grid(WORKLOADS, BUDGETS, SIDES),
        quick=grid(("argmax", "maxima"), (1, 0.5), ("bfloat16 inductor",)),
        measure=measure,
        summarise=summarise,
        missed=missed,
    ),
    "branch-price": Experiment(
        about="what it costs that branch values must not run again",
        cases=grid(PRICED, (0, 0.5, 0.3, "peak:0.5", "peak:0.3", "peak:0.1"), ("kept", "free")),
        quick=grid(("moe",), (0, 0.5), ("kept", "free")),
        measure=price,
        summarise=summarise_price,
        missed=dear,
    ),
    "branch-rounding": Experiment(
        about="step time with each 16-bit result rounded, over that without",
        cases=grid((*ROUNDED, *UNROUNDED), (None,), ("off", "on", "again", "inductor")),
        quick=grid(("argmax",), (None,), ("off", "on", "again", "inductor")),
        measure=rounding,
        summarise=summarise_rounding,
        missed=lambda found: [] if found["branching on"] <= 1.04 else ["rounding takes over 4 %"],
    ),
}
