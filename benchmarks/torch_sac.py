"""PyTorch's selective checkpointing on our statistics: its module program, its policy, its estimator."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from remat.sac import greedy_order, upper_envelope
from remat.sac.estimation.modules import ModuleStats, ModuleTree
from remat.sac.estimation.stats import PS_PER_MS
from remat.sac.solve.choices import ModuleChoice, candidates
from remat.sac.solve.peaks import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """What PyTorch's ``sac_milp`` decides, made into operators and simulated.

    Attributes:
        found: whether it found anything.
        said_ms: the recompute time that it states.
        said_bytes: the peak that it states.
        recompute_ms: what its decision really recomputes.
        peak_bytes: the simulated peak of its decision.
        fits: whether that is within the budget.
        solve_s: how long ``sac_milp`` took, not counting the policies.
        modules: how many modules it checkpoints.
    """

    found: bool
    said_ms: float
    said_bytes: int
    recompute_ms: float
    peak_bytes: int
    fits: bool
    solve_s: float
    modules: int


def their_plan(tree: ModuleTree, budget: int) -> Theirs:
    """Runs ``sac_milp`` on the statistics of a tree, with ours as its envelopes."""
    from torch.distributed._tools import sac_ilp

    units = [tree.modules[k].name for k in candidates(tree)]
    graph = as_graph(tree)
    started = time.perf_counter()
    chosen, said_ms, said_bytes = sac_ilp.sac_milp(graph, budget / 2**30, ac_units=units)
    solve_s = time.perf_counter() - started
    decision: dict[int, ModuleChoice] = {}
    places = {m.name: k for k, m in enumerate(tree.modules)}
    for name, discarded in chosen.items():
        module = tree[name]
        stats = module.stats
        assert stats is not None
        kept = sac_ilp.get_optimal_checkpointing_policy_per_module(stats, 1 - discarded)
        if not kept:  # no set of operators keeps so little
            continue
        stored = tuple(i for i, keep in enumerate(kept) if keep)
        decision[places[name]] = ModuleChoice(
            stored=stored,
            kept_bytes=sum(stats.memory[i] for i in stored),
            recompute_ps=round(
                PS_PER_MS
                * sum(
                    (ms for ms, keep in zip(stats.runtimes, kept, strict=True) if not keep),
                    start=module.overhead_ms,
                )
            ),
        )
    peak = simulate(tree, decision, tree.memory()).peak_bytes
    return Theirs(
        found=said_bytes >= 0,
        said_ms=said_ms,
        said_bytes=said_bytes,
        recompute_ms=sum(c.recompute_ps for c in decision.values()) / PS_PER_MS,
        peak_bytes=peak,
        fits=peak <= budget,
        solve_s=solve_s,
        modules=len(decision),
    )


def as_graph(tree: ModuleTree) -> Any:
    """A tree as ``torch.distributed._tools.ilp_utils.Graph``."""
    from torch.distributed._tools.ilp_utils import Graph

    ran = [m for m in tree.modules if m.calls]
    graph = Graph(len(ran))
    position = {
        tree.modules[k].name: i
        for i, k in enumerate(k for k in tree.post_order if tree.modules[k].calls)
    }
    graph.fw_post_order = list(position)
    for index, module in enumerate(ran):
        graph.add_node(
            _node(tree, module) | {"index": index, "pos_fw_post_order": position[module.name]}
        )
    for i, a in enumerate(ran):
        for j in range(i, len(ran)):
            if ran[j].name == a.name or ran[j].name.startswith(f"{a.name}."):
                graph.ad_matrix[i][j] = 1
    return graph


def _node(tree: ModuleTree, module: ModuleStats) -> Any:
    call = module.calls[0]
    node: dict[str, Any] = {
        "fqn": module.name,
        "param_per_module": module.parameter_bytes,
        "grad_per_module": module.parameter_bytes,
        "grad_total": int(tree.gradients[call.back]),
        "act_fw_per_module": module.activation_bytes,
        "act_total": int(tree.other[call.back]),
        "act_grad_per_module": call.gradient_bytes,
        "is_leaf": module.is_leaf or module.stats is None,
        "sac_runtime": 0.0,
        "sac_memory": 0,
        "n_segments": 0,
        "slopes": [],
        "intercepts": [],
    }
    if not node["is_leaf"] and module.stats is not None:
        fitted = upper_envelope(module.stats, greedy_order(module.stats))
        node |= {
            "sac_runtime": fitted.sac_runtime,
            "sac_memory": max(1, fitted.sac_memory),
            "n_segments": fitted.n_segments,
            "slopes": fitted.slopes,
            "intercepts": fitted.intercepts,
        }
    return node


def estimator_says() -> dict[str, str]:
    """What comes of PyTorch's ``SACEstimator`` on this machine, by mode, on a small model.

    Each mode runs in a process of its own: an exception in a hook of autograd can end it.
    """
    found = {}
    for mode in ("operator-level-cost-model", "operator-level-benchmark"):
        done = subprocess.run(
            [sys.executable, __file__, mode], capture_output=True, text=True, check=False
        )
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        found[mode] = said[-1][:200] if said else f"exit status {done.returncode}"
    return found


def _estimate(mode: str) -> str:
    import torch
    from torch.distributed._tools.sac_estimator import SACEstimator

    try:
        with FakeTensorMode():
            model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
            estimator = SACEstimator()
            with estimator(estimate_mode_type=mode), torch.no_grad():
                model(torch.ones(4, 8))
    except Exception as error:  # whatever it is, it is what there is to say
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return f"{len(estimator.sac_mod_stats)} modules"


if __name__ == "__main__":
    print(_estimate(sys.argv[1]))
