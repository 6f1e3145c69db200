"""``autoparallel estimate``: how many of which devices a model needs, and what that takes."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from autoparallel.commands.options import (
    JsonOption,
    OptimizerOption,
    PriceOption,
    ProcessesOption,
    SeqOption,
    SetOption,
    TargetArgument,
    print_json,
    stdout_console,
)
from autoparallel.options.parse import parse_count, parse_prices, parse_settings
from autoparallel.planner.plan import Precision

DevicesOption = Annotated[
    str,
    typer.Option(
        "--devices",
        metavar="NAME,…",
        help="devices by name; or clusters (8xH100), each taken as it is",
    ),
]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", help="tokens to train on, for days and dollars: 15e12, 15T, 300B"),
]
BatchOption = Annotated[int, typer.Option("--global-batch", min=1, help="samples per step")]
AutoPrecisionOption = Annotated[
    str | None,
    typer.Option("--precision", help="as for plan; default: bf16, on devices without it fp16"),
]
AdaptersOption = Annotated[
    str,
    typer.Option("--lora", metavar="r=8,alpha=16", help="the adapters of an hf: target, or none"),
]
MostOption = Annotated[
    int, typer.Option("--max-devices", min=1, help="the most devices that are tried")
]
SecondsOption = Annotated[float, typer.Option("--seconds", min=0.1, help="limit of each search")]


def estimate(
    target: TargetArgument,
    devices: DevicesOption = "RTX4090,A100-80GB,H100",
    tokens: TokensOption = None,
    price: PriceOption = None,
    global_batch: BatchOption = 64,
    seq: SeqOption = None,
    precision: AutoPrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    lora: AdaptersOption = "r=8,alpha=16",
    max_devices: MostOption = 1024,
    seconds: SecondsOption = 30.0,
    processes: ProcessesOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate how many devices TARGET needs for training and for LoRA, and how long it takes."""
    count = None if tokens is None else parse_count(tokens, "--tokens")
    prices = parse_prices(price)
    from autoparallel.analysis.estimate import Asked, estimate_target, has_lora, parse_devices
    from autoparallel.cache.plan_cache import plan_cache
    from autoparallel.options.asked import num_processes
    from autoparallel.options.progress import progress
    from autoparallel.report.estimates import estimates_json, print_estimates
    from autoparallel.target.load import load_target

    names = parse_devices(devices)
    loaded = load_target(target, parse_settings(settings or ()))
    asked = Asked(
        names, global_batch, seq, cast("Precision | None", precision), optimizer,
        lora if has_lora(loaded) and lora != "none" else None,
        max_devices, seconds, count, prices, processes or num_processes(),
    )  # fmt: skip
    with plan_cache() as cache, progress() as observe:
        found = estimate_target(loaded, asked, observe, cache.values)
    if json:
        print_json(estimates_json(found))
    else:
        print_estimates(found, stdout_console())
