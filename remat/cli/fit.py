"""The command ``remat fit``: find which batch sizes of a training step fit in a given memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from remat.cli.commands import (
    Step,
    json_option,
    main,
    model_arguments,
    record_options,
    takes_request,
)
from remat.cli.models import (
    called,
    check_not_hf,
    function_of,
    is_hf,
    load,
    takes_batch,
    users_output,
)
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import RematError
from remat.options import Training, ValueOptions

if TYPE_CHECKING:
    from remat.planning.request import PlanRequest


@main.command()
@model_arguments
@record_options(
    Training,
    *("memory", "margin", "optimizer", "batches", "accumulate", "ranks", "fsdp", "link_gbps"),
)
@takes_request("solver", "cost", "time_limit", *ValueOptions.__annotations__)
@record_options(Step, "lower", "device", "seq")
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
    under the best plan. With several ranks, the memory also includes the buffers of collectives.
    The optimizer runs on fake parameters, which shows the size of its state. The inputs of an hf
    model are built for each batch size. A function of yours is called with the batch size if its
    first argument is required or is named batch. For any other function, the first dimension of
    every tensor argument that it returns is taken to be the batch.
    """
    from remat.fitting.fit import fit_calls

    build = functools.cache(functools.partial(_calls, model, overrides, seq))
    with Progress() as progress, users_output():
        progress.stage(f"fitting {model}")
        table = fit_calls(
            lambda batch: build()(
                batch
            ),  # so that options are checked before the model is imported
            Training(**options),
            request,
            title="" if model.startswith("hf:") else model,
            on_progress=progress.detail,
        )
    if not as_json(table.to_json()):
        click.echo(str(table))
    if table.largest is None:
        raise RematError("no batch fits; the reasons stand with the rows")


def _calls(model: str, overrides: tuple[str, ...], seq: int | None) -> Callable[[int], Any]:
    """Return a function that takes a batch size and returns (model, positional arguments, keyword arguments)."""
    if is_hf(model):
        models: dict[str, Any] = {}

        def of_transformers(batch: int) -> Any:
            example = load(model, overrides, batch=batch, seq=seq)
            # The first model serves all batch sizes, because only the inputs depend on the batch size.
            return models.setdefault(model, example.model), example.args, example.kwargs

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
