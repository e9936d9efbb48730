"""The command `remat fit`: tables, JSON, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import run, shown, told

MODELS = """
def fixed():
    return Block(), (torch.randn(4, 16),)

def varied(batch):
    return Block(), (torch.randn(24 * batch, 16),), {}

def mixed():
    return lambda x, y: (x.sum() + y.sum()), (torch.randn(4, 16), torch.randn(3, requires_grad=True))
"""
GPT2 = ("hf:gpt2", "n_layer=1", "n_embd=24", "vocab_size=99", "--seq", "32")


@pytest.mark.parametrize("model", ["nets.py:fixed", "nets:varied"])
def test_a_function_of_the_users_has_a_batch(model: str) -> None:
    """Called with it, or told by the first dimension."""
    data = told("fit", model, "--memory", "1MiB", "--batch", "2,4", "--lower", "eager")
    assert [row["batch"] for row in data["rows"]] == [2, 4]
    assert data["rows"][0]["peak_bytes"] < data["rows"][1]["peak_bytes"]
    assert data["largest_batch"] == 4
    assert data["parameter_bytes"] == 4 * (2 * 16 * 48 + 16 + 48)
    assert data["model"] == model


def test_batches_are_tried_until_none_fits() -> None:
    options = ("--optimizer", "SGD:momentum=0.9", "--lower", "eager")
    text = shown("fit", "nets:varied", "--memory", "70kB", *options)
    assert "largest batch that fits: 2; " in text
    assert "no plan found" in text
    assert 'torch.compile(model, backend="remat", options={"budget": ' in text


def test_a_model_of_transformers_knows_its_batch_and_several_ranks_are_told() -> None:
    sharded = ("--ranks", "2", "--fsdp", "--lower", "eager")
    text = shown("fit", *GPT2, "--memory", "64MiB", "--batch", "2", *sharded)
    assert "on each of 2 ranks by FSDP2, 1 blocks" in text
    assert "largest batch that fits: 2" in text


def test_where_nothing_fits_the_command_fails_and_says_why() -> None:
    options = ("--batch", "4", "--json", "--lower", "eager")
    done = run("fit", "nets:varied", "--memory", "70kB", *options)
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert not any(row["fits"] for row in data["rows"])
    assert "no batch fits" in data["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nets:fixed", "--memory", "1GiB", "--fsdp"), "say ranks=8"),
        (("nets:fixed", "--memory", "1GiB", "--cost", "unit"), "no time"),
        (("nets:mixed", "--memory", "1GiB"), "first dimensions 3, 4"),
        ((*GPT2, "--memory", "66000B"), "alone take"),
        ((*GPT2, "--memory", "10KiB"), "alone take"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = run("fit", *arguments)
    assert done.exit_code == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
