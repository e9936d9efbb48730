"""`remat policies` and the option ``--policy``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

import remat
from remat.cli import main
from tests.cli.models import folder_with

MODELS = '''
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    def forward(self, x):
        return x + self.mlp(x + self.attn(x).sin())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()

def net():
    with torch.device("meta"):
        return Net(), (torch.zeros(512, 16),)
'''  # fmt: skip
MODEL = "nets_with_policies.py:net"
folder = folder_with("nets_with_policies", MODELS)


def run(command: str, *args: str) -> Result:
    return CliRunner().invoke(main, [command, MODEL, "--lower", "eager", "--quiet", *args])


def test_the_tree_of_modules_and_the_line_to_paste() -> None:
    asked = ("--policy", "*.attn=save", "--policy", "*.mlp=recompute")
    found = run("policies", *asked)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    heads = [line.split("  ")[0] or line.strip().split("  ")[0] for line in lines]
    assert [h.strip() for h in heads if h.strip() in ("layers.*", "attn", "mlp.*", "head")] == [
        "layers.*",
        "attn",
        "mlp.*",
        "head",
    ]
    (mlp,) = (line for line in lines if line.strip().startswith("mlp.*"))
    assert mlp.split()[-1] in ("recompute", "both")
    options = json.loads(lines[-1].partition("options=")[2].removesuffix(")"))
    assert options == {"budget": "1", "policies": {"*.attn": "save", "*.mlp": "recompute"}}
    remat.backend(**options)


def test_the_figures_are_those_of_the_plan() -> None:
    asked = ("--policy", "layers.0=recompute", "--json")
    told = json.loads(run("policies", *asked).stdout)
    planned = json.loads(run("plan", *asked).stdout)
    top = [row for row in told["modules"] if row["pattern"] in ("layers.*", "head")]
    assert sum(row["saved_bytes"] for row in top) == planned["saved_bytes"]
    assert sum(row["recompute_cost"] for row in top) == planned["recompute_cost"]
    assert json.loads(planned["policies"]) == told["policies"] == {"layers.0": "recompute"}


def test_the_policies_to_paste_say_what_the_plan_does() -> None:
    told = json.loads(run("policies", "--budget", "0.5", "--json").stdout)
    assert told["policies"]
    again = [a for p, v in told["policies"].items() for a in ("--policy", f"{p}={v}")]
    before, after = (
        json.loads(run("plan", "--budget", "0.5", "--json", *a).stdout) for a in ([], again)
    )
    assert after["recompute_cost"] == before["recompute_cost"]


@pytest.mark.parametrize(
    ("policy", "code", "says"),
    [
        ("*.mlp=keep", 2, "Invalid value for '--policy': policy '*.mlp' is 'keep'; expected 'save'"),
        ("*.mpl=save", 1, "the nearest are layers.0.mlp"),
        ("*.mlp=offload", 0, "in the host's memory at one time, over pcie4 (32 GB/s)"),
        ("layers.*=saved:1KiB", 0, "'layers.*=saved:1024B'"),
    ],
)  # fmt: skip
def test_the_option(policy: str, code: int, says: str) -> None:
    found = run("explain", "--policy", policy)
    assert found.exit_code == code, found.output
    assert says in " ".join(found.output.split())


def test_the_bound_of_the_host() -> None:
    asked = ("explain", "--policy", "*.mlp=offload", "--host-memory")
    assert run(*asked, "1GiB").exit_code == 0
    refused = run(*asked, "1B")
    assert refused.exit_code == 1
    assert (
        "host_memory is 1 B (1 bytes), and the values of 'Net' that must be offloaded take"
        in " ".join(refused.output.split())
    )
    unread = run(*asked, "much")
    assert unread.exit_code == 2
    assert "Invalid value for '--host-memory': host_memory is 'much'" in " ".join(
        unread.output.split()
    )
