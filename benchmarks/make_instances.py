"""Captures the training steps of `tests.architectures` as instances, under fake tensors.

    python -m benchmarks.make_instances [NAME …] [--to FOLDER]

Writes `benchmarks/instances/NAME.json`, the graph problem of one training step, for every
architecture, and `knapsack_NAME-expensive.json` and `knapsack_NAME-all.json` for some older ones:
the expensive operators alone, and with them what only the runtime-optimal cut keeps. Bytes are
counted as they are, costs are picoseconds on an H100 (roofline). The same versions of PyTorch and
transformers write the same bytes again.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import remat
from benchmarks.experiment import INSTANCES, silence
from remat.cli.hf import build
from remat.graph.costs import Roofline
from remat.graph.problems.lowering import Lowered, SavedKind
from remat.graph.roles import UNREACHABLE
from remat.passes.core.provenance import BanRules
from remat.passes.core.state import Distances, State
from remat.passes.decide.bans import banned
from remat.passes.decide.min_cut import Fusibility
from remat.planning.pipelines import prepare
from tests.architectures import ARCHITECTURES

KNAPSACKS: dict[str, tuple[str, str, int, int]] = {
    "llama-32": ("llama", "num_hidden_layers=32 dtype=bfloat16", 1, 2048),
    "gpt2-36": ("gpt2", "n_layer=36 n_embd=1280 n_head=20", 4, 1024),
    "bert-24": ("bert", "num_hidden_layers=24 hidden_size=1024 num_attention_heads=16 intermediate_size=4096", 8, 512),
    "vit-24": ("vit", "num_hidden_layers=24 hidden_size=1024 num_attention_heads=16 intermediate_size=4096", 8, 0),
    "t5-24": ("t5", "num_layers=24 num_decoder_layers=24 d_model=1024 d_ff=4096 num_heads=16", 8, 512),
}  # fmt: skip


def graph_instance(name: str, folder: Path) -> None:
    """Captures an architecture, and writes its graph problem."""
    model, args, kwargs = ARCHITECTURES[name]()
    count = sum(p.numel() for p in model.parameters())
    joint = remat.capture(model, args, kwargs)
    given = {**{f"input {i}": value for i, value in enumerate(args)}, **kwargs}
    shapes = [f"{key} {'×'.join(map(str, value.shape))}" for key, value in given.items()]
    dtype = str(next(model.parameters()).dtype).partition(".")[2]
    source = (
        f"{type(model).__name__}, {count:,} parameters in {dtype}, {', '.join(shapes)}; "
        f"{joint.lower} lowering"
    )
    path = folder / f"{name}.json"
    remat.save_instance(path, remat.instance(joint, Roofline(), name=name, source=source))
    print(f"{path.name}: {len(joint.graph.nodes):,} joint nodes", flush=True)


def knapsack_instances(name: str, folder: Path) -> None:
    """Captures a model and writes the two knapsacks that its planning could come down to."""
    kind, config, batch, seq = KNAPSACKS[name]
    example = build(kind, config.split(), batch=batch, seq=seq or None)
    state = prepare(remat.capture(example.model, example.args, example.kwargs))
    lowered = state.lowered(Roofline())
    bans = ("used_far_apart", "long_fusible_chains", "materialized_backward", "not_in_allowlist")
    loosest = BanRules(**{f"ban_{rule}": False for rule in bans})
    for part, rules in (("expensive", loosest), ("all", BanRules())):
        items = candidates(state, lowered, banned(state, rules, state.get(Fusibility())))
        weights = tuple(nbytes for _, nbytes in items)
        made = remat.Instance(
            name=f"{name}-{part}",
            problem=remat.KnapsackProblem(
                weights=weights,
                values=tuple(lowered.problem.cost[i] for i, _ in items),
                capacity=sum(weights) // 2,
            ),
            cost=str(Roofline()),
            unit=lowered.problem.unit,
            source=f"hf:{kind} {config}, batch {batch}, sequence {seq}, Inductor's joint graph",
        )
        path = folder / f"knapsack_{made.name}.json"
        remat.save_instance(path, made)
        print(f"{path.name}: {len(items)} items", flush=True)


def candidates(state: State, lowered: Lowered, ban: bytearray) -> list[tuple[int, int]]:
    """The operators that a cut keeps from recomputation, largest first, with their bytes.

    These are the bytes of all results that backward can reach, less the generator state that keeping
    them saves.
    """
    problem, distance, nodes = lowered.problem, state.get(Distances()), state.index.nodes
    weight: dict[int, int] = {}
    for i, kind in enumerate(lowered.kind):
        if kind is not SavedKind.VALUE or distance[lowered.position[i]] >= UNREACHABLE:
            continue
        producer = i
        while getattr(nodes[lowered.position[producer]].target, "__name__", "") == "getitem":
            source = problem.inputs[producer][0]
            if problem.savable[source]:
                break
            producer = source
        again = problem.recomputable[i] and problem.recomputable[producer]
        if again and ban[lowered.position[producer]]:
            weight[producer] = weight.get(producer, 0) + problem.size[i]
    for i in weight:
        for j in problem.inputs[i]:
            if lowered.kind[j] is SavedKind.GENERATOR_STATE:
                weight[i] -= problem.size[j]
    return sorted(
        ((i, n) for i, n in weight.items() if n > 0), key=lambda item: (-item[1], item[0])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    makers = {
        **dict.fromkeys(ARCHITECTURES, graph_instance),
        **dict.fromkeys(KNAPSACKS, knapsack_instances),
    }
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(makers)}")
    parser.add_argument("--to", type=Path, default=INSTANCES, help="folder of the instances")
    options = parser.parse_args()
    names = options.names or list(makers)
    if unknown := [name for name in names if name not in makers]:
        parser.error(f"there is no '{unknown[0]}'; known: {', '.join(makers)}")
    silence()
    options.to.mkdir(exist_ok=True)
    for name in names:
        makers[name](name, options.to)
        gc.collect()


if __name__ == "__main__":
    main()
