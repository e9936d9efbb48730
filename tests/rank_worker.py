"""One of two processes that plan together, under hash seeds of their own; what each comes to it writes to files.

``python -m tests.rank_worker FOLDER RANK`` runs every case below, each in a process group of its own,
and writes ``FOLDER/CASE.RANK.json``. A case that raises writes its traceback. The tests that read the
files are in ``test_distributed.py``.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from remat.errors import BudgetWarning
from remat.graph.costs import CostModel
from remat.graph.memory.liveness import Lifetime, StorageKind
from remat.integrations import step_tally
from remat.passes.core.control import Fixpoint, Runner
from remat.passes.core.state import PassResult, State
from remat.passes.ranks import protocol as ranks
from remat.plugins.registry import registry
from remat.running.measure import measure_step
from tests.rank_cases import Case, outcome, run_all

WORLD = 2
#: Rank 0 is up at once in these cases; where it is not, the case says so.
PATIENT, HASTY = 30.0, 0.3


class Contrary(remat.Solver):
    """Fills up from the first item on rank 0, from the last on rank 1."""

    name = "contrary"

    def solve(
        self, problem: remat.KnapsackProblem, *, time_limit: float | None = None
    ) -> Iterable[int]:
        order = list(range(len(problem.weights)))
        taken, room = [], problem.capacity
        for i in order if dist.get_rank() == 0 else order[::-1]:
            if problem.weights[i] <= room:
                taken.append(i)
                room -= problem.weights[i]
        return taken


class Moody(CostModel):
    """Products are dear on rank 0, everything else on rank 1."""

    name: ClassVar[str] = "moody"
    unit: ClassVar[str] = "op"

    def cost(self, node: fx.Node) -> int:
        product = "mm" in str(node.target)
        return 100 if product == (dist.get_rank() == 0) else 1


class MoodyTimes(Moody):
    """The same in a unit of time."""

    unit: ClassVar[str] = "ps"


class Mlp(nn.Module):
    """Layers of different widths, so that it matters which activations are kept."""

    def __init__(self, widths: Sequence[int] = (16, 24, 40, 24, 16), dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return self.dropout(x)


class Short(Mlp):
    """Two layers, which Inductor compiles soon."""

    def __init__(self) -> None:
        super().__init__((16, 24, 16))


class Taller(Mlp):
    """An operator more, in the middle of things."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cos())


class Uneven(Mlp):
    """Wide and narrow layers in turn, so that peaks below the highest leave a choice: a product or a sine."""

    def __init__(self) -> None:
        super().__init__((16, 64, 8, 64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return self.dropout(x)


def compiled(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """The model under the backend, planned by what ranks disagree on unless options say else."""
    asked: dict[str, Any] = {"rank_wait_s": PATIENT, "lower": "eager"}
    if "pipeline" not in options:  # which carries these
        asked |= {"budget": 0.5, "solver": Contrary(), "cost": "unit"}
    return torch.compile(model, backend="remat", dynamic=dynamic, options=asked | options)


def made(kind: type[Mlp] = Mlp, **arguments: Any) -> Mlp:
    torch.manual_seed(0)
    return kind(**arguments)


def step(model: nn.Module, f: Any, rows: int = 64, seed: int = 1) -> list[torch.Tensor]:
    """One training step; its gradients, parameter by parameter."""
    torch.manual_seed(seed)
    x = torch.randn(rows, 16)
    model.zero_grad(set_to_none=True)
    f(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether gradients are there and equal bit for bit."""
    return len(one) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """How far apart gradients are, as a share of the largest."""
    far = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
    return far / max(b.abs().max().item() for b in other)


def plan_of(f: Callable[[], Any]) -> remat.Plan:
    """The one plan that is made while something runs."""
    before = len(remat.plans())
    f()
    (plan,) = remat.plans()[before:]
    return plan


def figures(plan: remat.Plan) -> dict[str, Any]:
    return {k: v for k, v in json.loads(plan.to_json()).items() if k != "solve_s"}


def compile_one(kind: type[Mlp] = Mlp, rows: int = 64, **options: Any) -> dict[str, Any]:
    """Compiles a model, runs a step, and holds its gradients against those of eager PyTorch."""
    model, by_inductor = made(kind), options.get("lower") == "inductor"
    model.train(not by_inductor)  # Inductor draws other numbers
    expected = step(model, model, rows)
    found: list[torch.Tensor] = []
    torch._dynamo.reset()
    plan = plan_of(lambda: found.extend(step(model, compiled(model, **options), rows)))
    equal = apart(found, expected) < 1e-5 if by_inductor else same(found, expected)
    return {**figures(plan), "gradients_equal": equal}


# The cases -----------------------------------------------------------------------------------------


def case_equal(rank: int) -> Any:
    return compile_one(solver="auto")


def case_solver(rank: int) -> Any:
    alone = compile_one(rank_wait_s=None)
    return {"alone": alone, "together": compile_one()}


def case_peak(rank: int) -> Any:
    peak = remat.Peak(380_000)
    options = {"solver": "lagrangian", "cost": Moody(), "budget": peak}
    return {
        "alone": compile_one(Uneven, 256, **options, rank_wait_s=None),
        "together": compile_one(Uneven, 256, **options),
        "peak": peak.nbytes,
    }


class Core(Fixpoint):
    """A stranger's pass that is made of passes."""

    name: ClassVar[str] = "core"

    def run_with(self, state: State, runner: Runner) -> PassResult:
        return runner(self.passes, state)


def case_pipeline(rank: int) -> Any:
    default = remat.default_pipeline(0.5, Contrary(), "unit")
    at = [p.name for p in default.passes].index("min-cut")
    core, rest = default.passes[at : at + 3], default.passes[at + 3 :]
    nested = remat.PassManager((*default.passes[:at], Core(core, 1), *rest))
    return [compile_one(pipeline=p) for p in (default, nested)]


def case_graphs(rank: int) -> Any:
    first = compile_one(Taller if rank else Mlp)
    dist.barrier()
    return {"first": first, "second": compile_one(budget=0.3)}


def case_budgets(rank: int) -> Any:
    return compile_one(budget=0.3 + 0.3 * rank)


def case_alone(rank: int) -> Any:
    """Rank 1 compiles twice while rank 0 does something else; then rank 0 comes to one of those."""
    found: dict[str, Any] = {}
    if rank == 1:
        found["first"] = compile_one(budget=0.3, rank_wait_s=HASTY)
        found["second"] = compile_one(Taller, rank_wait_s=PATIENT)  # which is not spent
    dist.barrier()
    if rank == 0:
        found["first"] = compile_one(budget=0.3)
    dist.barrier()
    return {**found, "third": compile_one(budget=0.5)}


def case_dynamic(rank: int) -> Any:
    """Batches of different sizes under symbolic shapes: the graph is one, its bytes are two."""
    return compile_one(rows=64 + 32 * rank, dynamic=True)


BY_INDUCTOR: dict[str, Any] = {"solver": "auto", "cost": "flops", "lower": "inductor"}


def case_replans(rank: int) -> Any:
    """On rank 1 what Inductor writes takes more than on rank 0: the first plan is above the budget there alone."""
    from remat.integrations import budget_loop

    known, more = budget_loop.compiled_timeline, 60_000 * rank
    times = 0

    def taking_more(*compiled_pair: Any, **options: Any) -> Any:
        nonlocal times
        times += 1
        found = known(*compiled_pair, **options)
        extra = Lifetime(
            node="workspace",
            nbytes=more,
            kind=StorageKind.TEMPORARY,
            source="",
            first=0,
            last=len(found.program_points) - 1,
        )
        return replace(found, lifetimes=(*found.lifetimes, extra))

    budget_loop.compiled_timeline = taking_more
    try:
        plan = compile_one(Uneven, 256, budget=remat.Peak(330_000), **BY_INDUCTOR)
    finally:
        budget_loop.compiled_timeline = known
    return {**plan, "times": times, "budget": 330_000, "more": more}


def case_late(rank: int) -> Any:
    """Rank 1 dies between deciding and saying what its step takes: rank 0 goes on after a while."""
    if rank == 1:
        ranks.Ranks.largest, known = (lambda self, number, wait_s: number), ranks.Ranks.largest
    try:
        return compile_one(Short, 32, budget=remat.Peak("1GiB"), rank_wait_s=1.0, **BY_INDUCTOR)
    finally:
        if rank == 1:
            ranks.Ranks.largest = known


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)).sin())


class Wide(nn.Module):
    """Blocks of which each is a bucket of DDP's by itself, or sharded by itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), self.dropout)
        return x


def in_buckets(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


def sharded(model: Wide) -> nn.Module:
    """`fully_shard` around every block, compiled as a whole: Dynamo breaks the graph at its hooks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def _called(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)


def peaks(wrap: Callable[[Wide], nn.Module]) -> Any:
    """A step under a peak above what it takes, and under one below, with what was measured and said."""
    x = torch.randn(512, 256)
    found: list[dict[str, Any]] = []
    for part in (0.0, 1.15, 0.7):
        budget = int(part * found[0]["taken"]) if found else 1 << 30
        torch._dynamo.reset()
        model = wrap(Wide())
        options = {"lower": "eager", "budget": remat.Peak(budget)}
        model.compile(backend="remat", options=options)
        resident = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken = measure_step(partial(_called, model), (x,), resident=resident, by="allocator")
        said = [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]
        found.append({"budget": budget, "taken": taken.peak_bytes, "said": said})
    return found


def case_ddp_peak(rank: int) -> Any:
    return peaks(in_buckets)


def case_fsdp2_peak(rank: int) -> Any:
    return peaks(sharded)


def by_block(wrap: Callable[[Wide], nn.Module], rows: Sequence[int], rank: int) -> Any:
    """Blocks compiled one by one, in steps of which each rank has rows of its own: peaks, plans and gradients."""
    torch.manual_seed(0)
    plain, model = Wide(), Wide()
    model.load_state_dict(plain.state_dict())
    batches = [torch.randn(n, 256) for n in rows]
    each = [torch.autograd.grad(plain(x).square().mean(), [*plain.parameters()]) for x in batches]
    expected = [sum(g) / WORLD for g in zip(*each, strict=True)]
    limit = 29_600_000
    for block in model.blocks:
        options = {"lower": "eager", "budget": remat.Peak(limit)}
        block.compile(backend="remat", options=options)
    wrapped, counted = wrap(model), step_tally.tally_of(limit)
    peaks, errors = [], []
    before = len(remat.plans())
    for _ in range(4):
        wrapped.zero_grad()
        wrapped(batches[rank]).square().mean().backward()
        peaks.append(counted._peak)
        found = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in wrapped.parameters()]
        errors.append(apart(found, expected))
    plans = [figures(p)["saved"] for p in remat.plans()[before:]]
    return {"limit": limit, "peaks": peaks, "error": max(errors), "plans": plans}


def case_ddp_by_block(rank: int) -> Any:
    return by_block(nn.parallel.DistributedDataParallel, (1024, 1024), rank)


def case_fsdp2_by_block(rank: int) -> Any:
    return by_block(sharded, (1024, 1024), rank)


def case_one_plans_again(rank: int) -> Any:
    """Rank 1 has half of the rows, so rank 0 alone exceeds the budget, and compiles again while rank 1 waits for it."""
    return by_block(sharded, (1024, 512), rank)


def case_ddp(rank: int) -> Any:
    """Gradients averaged by one process against those of DDP; its buckets make several graphs."""
    model = made(widths=(16, 600, 600, 600, 16))
    each = [step(model, model, seed=1 + r) for r in range(WORLD)]
    expected = [sum(g) / WORLD for g in zip(*each, strict=True)]
    torch._dynamo.reset()
    before = len(remat.plans())
    found = step(model, compiled(in_buckets(model), budget=0.3), seed=1 + rank)
    plans = [figures(p) for p in remat.plans()[before:]]
    return {"plans": plans, "error": apart(found, expected)}


def collectives(f: Callable[[], Any]) -> dict[str, int]:
    """How often each collective runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as run:
        f()
    names = sorted(e.name for e in run.events() or () if e.name.startswith("c10d::"))
    return {n: names.count(n) for n in dict.fromkeys(names)}


def case_fsdp2(rank: int) -> Any:
    """Gradients and collectives of a sharded model, in eager PyTorch, compiled, and by one process."""

    def run(model: nn.Module, rank: int) -> None:
        torch.manual_seed(5 + rank)
        model.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()

    results: list[Any] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = sharded(Wide(dropout=0.2))
        before = len(remat.plans())
        if compiles:
            options = {"lower": "eager", "budget": 0.5, "solver": Contrary(), "cost": "unit"}
            model.compile(backend="remat", options=options)
        run(model, rank)
        counts = collectives(lambda model=model: run(model, rank))
        gradients = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
        results.append([gradients, counts, [figures(p) for p in remat.plans()[before:]]])
    torch.manual_seed(0)
    reference, expected = Wide(dropout=0.2), []
    for r in range(WORLD):
        run(reference, r)
        expected.append([p.grad for p in reference.parameters() if p.grad is not None])
    (eager, counted, _), (found, counts, plans) = results
    return {
        "eager": counted,
        "compiled": counts,
        "same_as_eager": same(eager, found),
        "error": apart(found, [sum(g) / WORLD for g in zip(*expected, strict=True)]),
        "plans": plans,
    }


def case_collective(rank: int) -> Any:
    """An all-gather inside the graph: it is kept or not recomputed, at budget 0 too."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    model = made(widths=(16, 16, 16), dropout=0.0)
    assert dist.group.WORLD is not None

    def f(x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_tensor_autograd(torch.tanh(model(x)), 0, dist.group.WORLD)
        return model(gathered.sin())

    expected = step(model, f)
    counts = collectives(lambda: step(model, f))
    torch._dynamo.reset()
    g = compiled(f, budget=0)
    plan = plan_of(lambda: step(model, g))
    return {
        **figures(plan),
        "gradients_equal": same(step(model, g), expected),
        "eager": counts,
        "compiled": collectives(lambda: step(model, g)),
    }


class Sharded(nn.Module):
    """Products with weights of which each rank has a part, gathered before each product."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(16, 16) / 4 for _ in range(3)]
        self.parts = nn.ParameterList(nn.Parameter(w.chunk(WORLD)[rank].clone()) for w in whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, gathering_again)
        for part in self.parts:
            weight = checkpoint(gathered, part, use_reentrant=False, context_fn=contexts)
            x = torch.tanh(x @ weight).sin()
        return x


def gathered(part: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    assert dist.group.WORLD is not None
    return all_gather_tensor_autograd(part, 0, dist.group.WORLD)


def gathering_again(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Runs all-gathers and their waits again, as torchtitan and AutoParallel tag those of FSDP's parameters."""
    again = op in (GATHER, torch.ops._c10d_functional.wait_tensor.default)
    return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.PREFER_SAVE


GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def case_host(rank: int) -> Any:
    """Values that a policy sends to the host, where ranks disagree on the others."""
    return compile_one(policies={"dropout": "offload"}, cost=MoodyTimes())


def case_gathered_again(rank: int) -> Any:
    """All-gathers that are tagged MUST_RECOMPUTE, under costs on which ranks disagree."""
    model = Sharded(rank)
    expected = step(model, model)
    counts = collectives(lambda: step(model, model))
    found = []
    for budget in (0.5, 0):
        torch._dynamo.reset()
        f = compiled(model, budget=budget, cost=Moody())
        plan = plan_of(lambda f=f: step(model, f))
        order = [
            [n.name for n in gm.graph.nodes if "_c10d_functional" in str(n.target)]
            for gm in (plan.forward, plan.backward)
        ]
        gathers = {n.name for n in plan.forward.graph.nodes if n.target is GATHER}
        found.append(
            {
                "order": order,
                "again": sorted(gathers.intersection(order[1])),
                "saved": [name for name in plan.saved if "wait" in name or "gather" in name],
                "same": same(step(model, f), expected),
                "collectives": collectives(lambda f=f: step(model, f)),
            }
        )
    return {"eager": counts, "found": found}


class Attention(nn.Module):
    """Views, a softmax, dropout and a residual."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.project(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.dropout(torch.softmax(q @ k.mT / (w // self.heads) ** 0.5, -1))
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))


def case_hash_seed(rank: int) -> Any:
    """Each rank's own plans, by every solver of ours that promises to be deterministic."""
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(4, 24, 32)
    joint = remat.capture(model, (x,), lower="eager")
    found: dict[str, Any] = {"graph": joint.fingerprint}
    for name in remat.solver_names():
        solver = registry().solver(name)
        if solver.deterministic and type(solver).__module__.startswith("remat."):
            found[name] = figures(remat.plan(joint, 0.4, solver=name, cost="flops"))
    return found


def main(folder: Path, rank: int) -> None:
    run_all(globals(), folder, rank, WORLD, outcome_and_told)


def outcome_and_told(case: Case, rank: int) -> dict[str, Any]:
    """What a case comes to, and what the ranks were told meanwhile."""
    ranks._REPORTED.clear()
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = outcome(case, rank)
    told = [str(w.message) for w in caught if issubclass(w.category, ranks.RankWarning)]
    return {**found, "told": told}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
