"""`remat run` trains scripts that nobody edits: what they print, raise and return is as without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from remat.cli import main

ROOT = Path(__file__).parents[2]
#: Prints its losses, which depend on the gradients of every step.
TRAIN = '''
import multiprocessing
import sys

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(torch.tanh(h) * torch.sigmoid(h))

def train(steps):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(256, 16)
    compiled = torch.compile(model, options={"max_fusion_size": 32})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.5f}", flush=True)

if __name__ == "__main__":
    if "--spawn" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=train, args=(2,))
        child.start()
        child.join()
    else:
        train(2)
    sys.exit(7)
'''  # fmt: skip
SHOW = """
import sys

print(sys.argv, __name__, __spec__ and __spec__.name, sys.path[0], sys.flags.utf8_mode)
if "--fail" in sys.argv:
    raise ValueError("as asked")
"""


def python(folder: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, where it finds this remat."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("spawn", [False, True], ids=["itself", "spawned"])
def test_a_script_trains_under_the_budget_in_each_process(folder: Path, spawn: bool) -> None:
    (folder / "train.py").write_text(TRAIN)
    command = ["train.py", *(["--spawn"] if spawn else [])]
    ours = python(folder, "-m", "remat", "run", "--budget", "peak:0.3", *command)
    assert ours.returncode == 7, ours.stderr
    head = "remat run, process [0-9]+" if spawn else "remat run"
    assert re.search(
        rf"^{head}: 1 graph compiled, 1 plan made\n{head}: 'Net 0/0': peak ",
        ours.stderr,
        re.MULTILINE,
    )
    assert ("the script calls torch.compile nowhere" in ours.stderr) is spawn
    if not spawn:
        plain = python(folder, "train.py")
        assert (plain.returncode, "remat" in plain.stderr) == (7, False)
        assert ours.stdout.count("loss ") == 2
        assert ours.stdout == plain.stdout


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ([], ["show.py", "--budget", "1", "-m", "--fail"]),
        (["-X", "utf8"], ["-m", "show", "--help", "--", "x"]),
    ],
    ids=["file", "module"],
)
def test_a_script_starts_and_ends_as_without_remat(
    folder: Path, flags: list[str], command: list[str]
) -> None:
    (folder / "show.py").write_text(SHOW)
    ours = python(folder, *flags, "-m", "remat", "run", "--budget", "40GiB", *command)
    plain = python(folder, *flags, *command)
    assert plain.stdout
    assert (ours.stdout, ours.stderr, ours.returncode) == (
        plain.stdout,
        plain.stderr,
        plain.returncode,
    )
    assert ours.returncode == ("--fail" in command)


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (["-u", "-m", "remat"], ["-u"]),
        (["-X", "dev", "-mremat"], ["-X", "dev"]),
        (["/bin/remat"], []),
    ],
    ids=["torchrun", "joined", "installed"],
)
def test_the_script_gets_the_flags_of_python(
    given: list[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "--budget", "1", "-m", "train", "--lr", "1"]
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "orig_argv", ["python", *given, *words])
    monkeypatch.setattr(sys, "argv", ["remat", *words])
    monkeypatch.setattr(os, "execve", lambda _, command, __: started.append(command))
    assert CliRunner().invoke(main, words).exit_code == 0
    assert started == [[sys.executable, *flags, "-m", "train", "--lr", "1"]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "40GB of memory"], "budget is '40GB of memory'"),
        (["--chunk", "0"], "chunk is '0'; expected a number of chunks"),
        (["--solver", "nonsense"], "nonsense"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_wrong_usage_is_told_before_the_script_starts(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the script was started"))
    script = ["train.py"] if options else []
    done = CliRunner().invoke(main, ["run", *options, *script])
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_a_process_that_pytorch_cannot_load_remat_into_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the script was started"))
    done = CliRunner().invoke(main, ["run", "train.py"])
    assert done.exit_code == 2
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in " ".join(done.stderr.split())
