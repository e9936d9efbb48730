"""Modules that DDP and FSDP2 wrap: which orders compile a graph, as the pages say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import remat

COMPILED = {"backend": "remat", "options": {"budget": 0.5, "lower": "eager"}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, **COMPILED)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(**COMPILED)
    return model


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


#: PyTorch 2.14 and newer compile the `forward` of PyTorch's own modules.
OWN = int(torch.__version__ >= "2.14")


@pytest.mark.parametrize(
    ("make", "wrap", "plans"),
    [
        (sequential, lambda m: DistributedDataParallel(compiled(m)), 1),
        (sequential, lambda m: compiled(DistributedDataParallel(m)), 0),
        (Net, lambda m: compiled(DistributedDataParallel(m)), 1),
        (sequential, lambda m: sharded(compiled(m)), 1),
        (sequential, lambda m: compiled(sharded(m)), 0),
        (Net, lambda m: compiled(sharded(m)), 1),
        (Net, lambda m: sharded(compiled_in_place(m)), 1),
        (sequential, compiled, 1),
        (sequential, compiled_in_place, OWN),
        (Net, compiled_in_place, 1),
    ],
)
def test_the_orders_that_the_page_names_compile_a_graph(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], plans: int
) -> None:
    torch._dynamo.reset()
    plain, x = make(), torch.randn(8, 16)
    model = wrap(copy.deepcopy(plain))
    before = len(remat.plans())
    for each in (plain, model):
        each(x).sum().backward()
    assert len(remat.plans()) - before == plans
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(found, theirs.grad)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it behind a graph break
@pytest.mark.parametrize(("arguments", "plans"), [({}, 2), ({"use_cache": False}, 1)])
def test_checkpointing_by_transformers_breaks_the_graph_unless_use_cache_is_off(
    arguments: dict[str, bool], plans: int
) -> None:
    torch._dynamo.reset()
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **arguments)).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(0, 64, (2, 8))
    before = len(remat.plans())
    compiled(model)(input_ids=ids, labels=ids).loss.backward()
    assert len(remat.plans()) - before == plans
