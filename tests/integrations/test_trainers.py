"""Trainers that people use: loss and parameters after some steps are those of training without remat."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import remat

STEPS = 3
OPTIONS = {"budget": 0.3, "lower": "eager"}


def llama(vocabulary: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(k))
        return {"input_ids": ids, "labels": ids}


def by_trainer(model: Any, folder: Path) -> None:
    """Hugging Face's Trainer, which trains by Accelerate, with a checkpoint at the end."""
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_steps=STEPS, seed=1,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Tokens()).train()
    again = LlamaForCausalLM.from_pretrained(folder / f"checkpoint-{STEPS}")
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def by_lightning(model: Any, folder: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Tokens(), batch_size=2))


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_the_page_chunks_the_loss(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    code = page[page.index("@torch.compile(backend") :].partition("```")[0]
    options = 'budget="40GiB", chunk="auto"'
    assert options in code
    known: dict[str, Any] = {"torch": torch, "remat": remat, "Trainer": Trainer}
    exec(code.replace(options, 'budget=0.5, chunk=4, lower="eager"'), known)
    torch._dynamo.reset()
    plain, chunked = llama(1024), llama(1024)
    for model, trainer in ((plain, Trainer), (chunked, known["ChunkedTrainer"])):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", per_device_train_batch_size=1, seed=1,
        )  # fmt: skip
        torch.manual_seed(1)
        trainer(model, arguments, train_dataset=Tokens()).train()
    assert remat.plans()[-1].chunk == "chunk-loss(chunks=4)"
    torch.testing.assert_close(chunked.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [by_trainer, by_lightning])
def test_training_comes_to_the_same(train: Callable[[Any, Path], None], tmp_path: Path) -> None:
    pytest.importorskip("lightning" if train is by_lightning else "accelerate")
    torch._dynamo.reset()
    plain = llama()
    compiled = copy.deepcopy(plain)
    known = len(remat.plans())
    compiled.compile(backend="remat", options=OPTIONS)
    for model, name in ((plain, "plain"), (compiled, "remat")):
        torch.manual_seed(1)
        train(model, tmp_path / name)
    assert len(remat.plans()) > known
    theirs = plain.state_dict()
    assert list(compiled.state_dict()) == list(theirs)
    for key, value in compiled.state_dict().items():
        torch.testing.assert_close(value, theirs[key], msg=lambda text, key=key: f"{key}: {text}")
    moved = max(
        (a - b).abs().max() for a, b in zip(llama().parameters(), plain.parameters(), strict=True)
    )
    assert moved > 1e-4, "training did something"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of one process, as FSDP2 asks for."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_with_selective_checkpointing_as_torchtitan_orders_it() -> None:
    """Checkpoint the blocks by a plan, compile each, then shard each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (1,))
    plain = llama()
    ours = copy.deepcopy(plain)
    ids = torch.randint(0, 64, (8, 64))
    batch = {"input_ids": ids, "labels": ids}
    plan = remat.checkpointing.plan(ours, kwargs=batch, memory=0.8)
    remat.sac.apply(ours, plan)
    for model in (plain, ours):
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (key, mine), theirs in zip(
        ours.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), msg=key)
