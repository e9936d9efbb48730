"""The peak of whole training steps: what `remat.fit` predicts, and what the allocator gave.

    python benchmarks/fit.py [--only llama,resnet] [--json FILE]

For each model of `transformers` and each optimizer: the step at budget 1, and under the budget that `remat.fit`
names for 93 % of its peak. The step (forward, backward, the optimizer's step, no gradients after it) really
trains on the CPU, by the eager lowering; its peak is that of the profiler's record of every allocation.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import remat
from remat.cli.hf import build
from remat.running.measure import allocations
from remat.running.optimizer import read_optimizer

RESULTS = Path(__file__).parent / "results" / "fit.json"
OPTIMIZERS = ("adamw", "sgd:momentum=0.9")
BATCH = 4
SEQ = 128
#: Share of the peak at budget 1 that the second step is given.
TIGHT = 0.93
#: Models of `transformers`, by the overrides of their configs.
MODELS: Mapping[str, tuple[str, ...]] = {
    "llama": (
        "hidden_size=512",
        "intermediate_size=1408",
        "num_hidden_layers=4",
        "num_attention_heads=8",
        "num_key_value_heads=4",
        "vocab_size=8000",
    ),
    "gpt2": ("n_embd=512", "n_layer=4", "n_head=8", "vocab_size=8000"),
    "bert": (
        "hidden_size=512",
        "num_hidden_layers=4",
        "num_attention_heads=8",
        "intermediate_size=2048",
        "vocab_size=8000",
    ),
    "t5": ("d_model=512", "d_ff=1024", "num_layers=3", "num_decoder_layers=3", "vocab_size=8000"),
    "vit": (
        "hidden_size=384",
        "num_hidden_layers=6",
        "num_attention_heads=6",
        "intermediate_size=1536",
    ),
    "resnet": ("layer_type=basic", "depths=[2,2,2,2]", "hidden_sizes=[64,128,256,512]"),
}


def main() -> None:
    from machine import header

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    data: dict[str, Any] = {}
    if options.json.exists():
        data = json.loads(options.json.read_text())["models"]
    warnings.simplefilter("ignore")
    for name in only or MODELS:
        data[name] = [c for optimizer in OPTIMIZERS for c in cells(name, MODELS[name], optimizer)]
        print(json.dumps({name: data[name]}), flush=True)
        largest = max(abs(c["off"]) for found in data.values() for c in found)
        report = {**header("fit"), "largest_off": largest, "models": data}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table(data))


def cells(
    name: str,
    overrides: tuple[str, ...],
    optimizer: str,
    *,
    batch: int = BATCH,
    seq: int | None = SEQ,
    tight: float = TIGHT,
) -> list[dict[str, Any]]:
    """A model with an optimizer, at budget 1 and within less: predicted and measured.

    Args:
        name: a type of `transformers`' models.
        overrides: of its config.
        optimizer: as in `remat.fit`.
        batch: samples.
        seq: tokens; images have none.
        tight: share of the peak at budget 1 that the second step is given.
    """
    seq = None if name in ("vit", "resnet") else seq

    def given(at: int) -> dict[str, Any]:
        return dict(build(name, overrides, batch=at, seq=seq).kwargs)

    model = build(name, overrides, batch=batch, seq=seq).model
    found: list[dict[str, Any]] = []
    memory = 1 << 40
    for _ in range(2):
        row = remat.fit(
            model,
            given,
            memory=memory,
            optimizer=optimizer,
            batches=batch,
            lower="eager",
            cost="roofline:cpu",
        ).rows[0]
        assert row.budget is not None, row.reason
        allocated = allocated_peak(name, overrides, optimizer, batch, seq, row.budget)
        found.append(
            {
                "optimizer": optimizer,
                "budget": row.budget,
                "memory": memory,
                "predicted": row.peak_bytes,
                "allocated": allocated,
                "off": round(row.peak_bytes / allocated - 1, 6),
            }
        )
        memory = int(tight * row.peak_bytes)
    return found


def allocated_peak(
    name: str,
    overrides: tuple[str, ...],
    optimizer: str,
    batch: int,
    seq: int | None,
    budget: str,
) -> int:
    """Trains under a budget, and returns the most bytes that are allocated in the third step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    example = build(name, overrides, batch=batch, seq=seq, device="cpu")
    options = {"budget": budget, "lower": "eager"}
    compiled = torch.compile(example.model, backend="remat", options=options)
    stepping = read_optimizer(optimizer)[1](list(example.model.parameters()))

    def train() -> None:
        out = compiled(*example.args, **example.kwargs)
        out.loss.backward()
        stepping.step()
        stepping.zero_grad()

    train()
    train()
    state = (v for s in stepping.state.values() for v in s.values())
    alive = [
        *example.model.parameters(),
        *example.model.buffers(),
        *example.kwargs.values(),
        *state,
    ]
    storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in alive if torch.is_tensor(t)}
    with allocations() as events:
        train()
    current = peak = sum(storages.values())
    for nbytes in events:
        current += nbytes or 0
        peak = max(peak, current)
    return peak


def table(data: dict[str, Any]) -> Table:
    shown = Table("model", "optimizer", "budget", "predicted", "allocated", "off")
    for name, found in data.items():
        for c in found:
            shown.add_row(
                name,
                c["optimizer"],
                c["budget"],
                f"{c['predicted']:,}",
                f"{c['allocated']:,}",
                f"{c['off']:+.2%}",
            )
    return shown


if __name__ == "__main__":
    main()
