"""The command `remat fit`: tables, JSON, and what is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from remat.cli import main
from tests.cli.models import BLOCK, folder_with

folder = folder_with(
    "fitted",
    BLOCK
    + """
def fixed():
    return Block(), (torch.randn(4, 16),)


def varied(batch):
    return Block(), (torch.randn(batch, 16),), {}


def mixed():
    return lambda x, y: (x.sum() + y.sum()), (torch.randn(4, 16), torch.randn(3, requires_grad=True))
""",
)
GPT2 = ("hf:gpt2", "n_layer=1", "n_embd=24", "vocab_size=99", "--seq", "32")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["fit", *arguments])


@pytest.mark.parametrize("model", ["fitted.py:fixed", "fitted:varied"])
def test_a_function_of_the_users_has_a_batch(model: str) -> None:
    """Called with it, or told by the first dimension."""
    done = run(model, "--memory", "1MiB", "--batch", "2,4", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert [row["batch"] for row in data["rows"]] == [2, 4]
    assert data["rows"][0]["peak_bytes"] < data["rows"][1]["peak_bytes"]
    assert data["largest_batch"] == 4
    assert data["parameter_bytes"] == 4 * (2 * 16 * 48 + 16 + 48)
    assert data["model"] == model


def test_a_model_of_transformers_knows_its_batch() -> None:
    done = run(*GPT2, "--memory", "600KB", "--optimizer", "SGD:momentum=0.9")
    assert done.exit_code == 0, done.output
    assert "largest batch that fits: " in done.output
    assert "no plan found" in done.output
    assert 'torch.compile(model, backend="remat", options={"budget": ' in done.output


def test_several_ranks_are_told() -> None:
    done = run(*GPT2, "--memory", "4MiB", "--batch", "1", "--ranks", "2", "--fsdp")
    assert done.exit_code == 0, done.output
    assert "on each of 2 ranks by FSDP2, 1 blocks" in done.output


def test_where_nothing_fits_the_command_fails_and_says_why() -> None:
    done = run(*GPT2, "--memory", "150KB", "--batch", "1,64", "--json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)["rows"]
    assert not any(row["fits"] for row in rows)
    assert "no batch fits" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--memory", "80"), "did you mean '80GiB'"),
        (("--memory", "1GiB", "--batch", "0"), "batch is 0; expected whole numbers of 1 or more"),
        (("--memory", "1GiB", "--batch", "1,many"), "batch is 'many'"),
        (("--memory", "1GiB", "--optimizer", "adamv"), "did you mean 'adam'"),
        (("--memory", "1GiB", "--optimizer", "lbfgs"), "cannot be traced"),
        (("--memory", "1GiB", "--ranks", "0"), "--ranks"),
        ((), "--memory"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], says: str) -> None:
    done = run("fitted:fixed", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fitted:fixed", "--memory", "1GiB", "--fsdp"), "say ranks=8"),
        (("fitted:fixed", "--memory", "1GiB", "--cost", "unit"), "no time"),
        (("fitted:mixed", "--memory", "1GiB"), "first dimensions 3, 4"),
        ((*GPT2, "--memory", "66000B"), "alone take"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments, "--quiet")
    assert done.exit_code == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_weights_that_are_really_allocated_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.cli.models.LARGE", 1000)
    done = run("fitted:fixed", "--memory", "1MiB", "--batch", "2")
    assert done.exit_code == 0, done.output
    assert "'fitted:fixed' allocates 6.25 KiB of weights; under torch.device('meta')" in done.stderr


def test_several_ranks_with_offloading_are_wrong_usage() -> None:
    done = run("fitted.py:fixed", "--memory", "1MiB", "--ranks", "2", "--offload", "25GB/s")
    assert done.exit_code == 2, done.output
    assert "Invalid value for '--offload'" in done.output
