"""The command ``remat fit``: find which batch sizes of a training step fit in a given memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    device_option,
    json_option,
    lower_option,
    main,
    model_arguments,
    record_options,
    seq_option,
    takes_request,
    users_output,
)
from remat.cli.models import called, check_not_hf, function_of, is_hf, load, takes_batch
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import RematError
from remat.options import Training, ValueOptions

if TYPE_CHECKING:
    from remat.planning.request import PlanRequest


def _batches(text: str) -> Any:
    from remat.fitting.fit import read_batches

    if text.strip() == "max":
        return "max"
    numbers: list[int | str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            numbers.append(int(part))
        except ValueError:  # no number, or one of thousands of digits
            numbers.append(part)
    read_batches(numbers)
    return numbers


def _optimizer(text: str) -> str:
    from remat.running.optimizer import read_optimizer

    return read_optimizer(text)[0]


#: Settings of click for the options of training, as `record_options` takes them.
_TRAINING: Mapping[str, Mapping[str, Any]] = {
    "memory": {"type": params.Checked("memory", "remat.fitting.fit:read_memory", as_text=True)},
    "margin": {"type": params.Checked("margin", "remat.fitting.fit:read_margin")},
    "optimizer": {"type": params.Checked("optimizer", _optimizer)},
    "batches": {
        "flag": "batch",
        "type": params.Checked("batches", _batches),
        "metavar": "BATCH,…|max",
    },
    "accumulate": {"type": click.IntRange(min=1)},
    "ranks": {"type": click.IntRange(min=1)},
    "fsdp": {},
    "link_gbps": {
        "flag": "link",
        "type": click.FloatRange(min=0, min_open=True),
        "metavar": "GB/s",
    },
}


@main.command()
@model_arguments
@record_options(Training, _TRAINING)
@takes_request("solver", "cost", "time_limit", *ValueOptions.__annotations__)
@lower_option
@device_option
@seq_option
@json_option
def fit(
    model: str,
    overrides: tuple[str, ...],
    seq: int | None,
    request: PlanRequest,
    **options: Any,
) -> None:
    """Find which batch sizes of MODEL's training step fit in a given memory, and how fast they are.

    The memory of a step includes parameters, gradients, the optimizer's state, and activations
    under the best plan. With several ranks, it also includes the buffers of collectives. The
    optimizer runs on fake parameters, which shows the size of its state. The inputs of an hf model
    are built for each batch size. A function of yours is called with the batch size if its first
    argument is required or is named batch. For any other function, the first dimension of every
    tensor argument that it returns is taken to be the batch.
    """
    from remat.fitting.fit import fit_calls

    with Progress() as progress, users_output():
        progress.stage(f"building {model}")
        table = fit_calls(
            _calls(model, overrides, seq),
            Training(**options),
            request,
            title="" if model.startswith("hf:") else model,
            on_progress=_stages(progress),
        )
    if not as_json(table.to_json()):
        click.echo(str(table))
    if table.largest is None:
        raise RematError("no batch fits; the reasons stand with the rows")


def _stages(progress: Progress) -> Callable[[str], None]:
    """Return a callback that shows a text of the form ``stage: detail``, or a stage alone, as progress."""
    current = ""

    def on_progress(text: str) -> None:
        nonlocal current
        stage, colon, detail = text.partition(": ")
        if stage != current:
            progress.stage(stage)
            current = stage
        if colon:
            progress.detail(detail)

    return on_progress


def _calls(model: str, overrides: tuple[str, ...], seq: int | None) -> Callable[[int], Any]:
    """Return a function that takes a batch size and returns (model, positional arguments, keyword arguments)."""
    if is_hf(model):
        models: list[Any] = []

        def of_transformers(batch: int) -> Any:
            example = load(model, overrides, batch=batch, seq=seq)
            if not models:
                models.append(example.model)
            # The first model serves all batch sizes, because only the inputs depend on the batch size.
            return models[0], example.args, example.kwargs

        return of_transformers
    check_not_hf(model, overrides, seq)
    function = function_of(model)
    if takes_batch(function):

        def of_users(batch: int) -> Any:
            example = called(function, model, batch)
            return example.model, example.args, example.kwargs

        return of_users
    from remat.fitting.fit import varied

    example = called(function, model)
    arguments = varied(example.args, example.kwargs)
    return lambda batch: (example.model, *arguments(batch))
