"""What lies on one of several ranks, counted by hand from the rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from remat.fitting.sharding import Sharding, shard
from remat.graph.memory.storages import storage_key


class Model(nn.Module):
    """Three blocks of 100 numbers (one of them of 200), and 40 outside of them; 4 bytes each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(40))
        self.layers = nn.ModuleList(nn.Linear(10, n, bias=False) for n in (10, 20, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[:, :10]
        return (x.sum(0) + self.embed[:10]).sum()


def sharding(ranks: int, *, fsdp: bool, frozen: bool = False) -> Sharding:
    model = Model()
    parameters = list(model.parameters())
    trained = {
        key
        for p in parameters
        if not (frozen and p is model.embed) and (key := storage_key(p)) is not None
    }
    return Sharding.of(model, list(parameters), trained, ranks, fsdp)


def test_one_rank_has_everything() -> None:
    alone = sharding(1, fsdp=False)
    assert (alone.parameter_bytes, alone.gradient_bytes) == (4 * 440, 4 * 440)
    assert alone.gathered_bytes == alone.reduced_bytes == alone.bucket_bytes == 0
    assert alone.sent_bytes == 0
    assert alone.label == ""


def test_ddp_has_a_copy_of_the_gradients_in_buckets() -> None:
    several = sharding(4, fsdp=False, frozen=True)
    assert several.parameter_bytes == 4 * 440
    assert several.gradient_bytes == several.bucket_bytes == 4 * 400
    assert several.sent_bytes == 2 * 4 * 400 * 3 // 4


def test_fsdp_has_a_part_of_everything_and_gathers_two_blocks() -> None:
    """Of ten rows on four ranks the first has three."""
    several = sharding(4, fsdp=True)
    assert several.parameter_bytes == several.gradient_bytes == 4 * (10 + 30 + 50 + 30)
    assert several.gathered_bytes == 4 * (40 + 2 * 200)
    assert several.reduced_bytes == 4 * 2 * 200
    assert several.final_bytes == 4 * (40 + 2 * 40)
    assert several.block_sizes == {400, 800}
    assert several.sent_bytes == 4 * (40 + 2 * 400 + 440) * 3 // 4
    assert several.label == "4 ranks by FSDP2, 3 blocks"


def test_without_blocks_all_is_the_roots() -> None:
    model = nn.Linear(10, 10, bias=False)
    trained = {k for p in model.parameters() if (k := storage_key(p)) is not None}
    whole = Sharding.of(model, list(model.parameters()), trained, 2, fsdp=True)
    assert (whole.parameter_bytes, whole.gathered_bytes, whole.reduced_bytes) == (200, 400, 0)
    assert whole.final_bytes == 1200


@pytest.mark.parametrize(("shape", "expected"), [((10, 3), (3, 3)), ((3,), (1,)), ((), (1,))])
def test_a_shard_is_a_part_of_the_first_dimension(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert shard(torch.empty(shape), 4).shape == expected


def test_the_step_of_several_ranks_is_that_of_one_with_other_bytes() -> None:
    with torch.device("meta"):
        model = Model()

    def fit(**how: object) -> remat.Fit:
        return remat.fit(
            model,
            lambda batch: (torch.empty(batch, 10, device="meta"),),
            memory="1GiB",
            batches=8,
            lower="eager",
            **how,  # type: ignore[arg-type]
        )

    alone, ddp, fsdp = fit(), fit(ranks=4), fit(ranks=4, fsdp=True)
    whole = alone.parameter_bytes
    assert ddp.rows[0].peak_bytes == alone.rows[0].peak_bytes + whole
    assert fsdp.state_bytes == 2 * fsdp.parameter_bytes + 4 * 4
    assert fsdp.parameter_bytes < whole / 3
    assert [f.rows[0].budget for f in (alone, ddp, fsdp)] == ["1", "1", "1"]
    rate = alone.rows[0].samples_per_s
    assert rate is not None
    assert rate < (ddp.rows[0].samples_per_s or 0) <= 4 * rate


def test_ten_layers_of_a_llama_of_70_billion_parameters_take_sixteen_ranks() -> None:
    """Too large for one; on sixteen of them by FSDP2 a batch of one fits with AdamW."""
    from remat.cli.hf import build

    overrides = (
        "dtype=bfloat16",
        "hidden_size=8192",
        "intermediate_size=28672",
        "num_hidden_layers=10",
        "num_attention_heads=64",
        "num_key_value_heads=8",
        "vocab_size=32000",
    )
    model = build("llama", overrides, batch=1, seq=16).model

    def given(batch: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch, 1024, dtype=torch.long, device="meta")
        return {"input_ids": tokens, "labels": tokens}

    with pytest.raises(remat.RematError, match=r"parameters of .* alone take 16.9 GiB"):
        remat.fit(model, given, memory="16GiB")
    fit = remat.fit(model, given, memory="16GiB", batches=1, ranks=16, fsdp=True)
    row = fit.rows[0]
    assert row.fits
    assert 16.9 / 16 < fit.parameter_bytes / 2**30 < 1.1
    assert 5 * 1.05 < row.peak_bytes / 2**30 <= 16
