"""`remat policies` and the option ``--policy``."""

from __future__ import annotations

import json

import pytest
from click.testing import Result

import remat
from tests.cli.command import run as command

MODELS = '''
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    def forward(self, x):
        return x + self.mlp(x + self.attn(x).sin())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()

def net():
    with torch.device("meta"):
        return Net(), (torch.zeros(512, 16),)
'''  # fmt: skip


def run(name: str, *args: str) -> Result:
    return command(name, "nets.py:net", "--lower", "eager", *args)


def flat(found: Result) -> str:
    return " ".join(found.output.split())


def test_the_tree_of_modules_and_the_line_to_paste() -> None:
    asked = ("--policy", "*.attn=save", "--policy", "*.mlp=recompute")
    found = run("policies", *asked)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    patterns = ["layers.*", "layers.*.attn", "layers.*.mlp.*", "head"]
    rows = {line.partition("  ")[0]: line.split() for line in lines}
    assert [name for name in rows if name in patterns] == patterns
    assert rows["layers.*.attn"][1] == "2"
    assert rows["layers.*.attn"][-1] == "save"
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
    asked = ("--budget", "0.5", "--json")
    policies = json.loads(run("policies", *asked).stdout)["policies"]
    assert policies
    again = [a for p, v in policies.items() for a in ("--policy", f"{p}={v}")]
    before, after = (
        json.loads(run("plan", *asked, *a).stdout)["recompute_cost"] for a in ([], again)
    )
    assert after == before


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("*.mpl=save", 1, "the nearest are layers.0.mlp"),
        ("layers.*=saved:1KiB", 0, "'layers.*=saved:1024B'"),
        ("*.mlp=offload --host-memory 1GiB", 0, "in the host's memory at one time, over pcie4 (32 GB/s)"),
        ("*.mlp=offload --host-memory 1B", 1, "host_memory is 1 B (1 bytes), and the values of 'Net' that must be offloaded take"),
    ],
)  # fmt: skip
def test_the_option(options: str, code: int, says: str) -> None:
    found = run("explain", "--policy", *options.split())
    assert found.exit_code == code, found.output
    assert says in flat(found)
