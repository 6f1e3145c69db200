"""``autoparallel estimate``: the fewest devices of each kind for a model, with time and price."""

from __future__ import annotations

from typing import cast

from autoparallel.actions.terminal import stdout_console
from autoparallel.analysis.estimate import (
    Asked,
    estimate_target,
    has_lora,
    num_processes,
    parse_devices,
)
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.options.parse import Sorting, parse_count, parse_prices, parse_settings
from autoparallel.options.progress import progress
from autoparallel.options.results import say_json
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Precision
from autoparallel.report.estimates import (
    estimates_json,
    print_estimates,
    sort_estimates,
)
from autoparallel.target.load import load_target


def estimate(
    *,
    target: str,
    devices: str,
    tokens: str | None,
    price: list[str] | None,
    global_batch: int,
    seq: int | None,
    precision: str | None,
    optimizer: str,
    lora: str,
    max_devices: int,
    seconds: float,
    processes: int | None,
    sort: Sorting | None,
    settings: list[str] | None,
    json: bool,
) -> None:
    """Print the devices, days and dollars that training ``target`` needs, by kind of device."""
    count = None if tokens is None else parse_count(tokens, "--tokens")
    prices = parse_prices(price)
    if sort in ("days", "dollars") and count is None:
        raise UsageError("AP352", f"--sort {sort} needs --tokens", fix="for example --tokens 15T")

    names = parse_devices(devices)
    loaded = load_target(target, parse_settings(settings or ()))
    asked = Asked(
        names,
        global_batch,
        seq,
        cast("Precision | None", precision),
        optimizer,
        lora if has_lora(loaded) and lora != "none" else None,
        max_devices,
        seconds,
        count,
        prices,
        processes or num_processes(),
    )
    with plan_cache() as cache, progress() as observe:
        found = sort_estimates(estimate_target(loaded, asked, observe, cache.values), sort)
    if json:
        say_json("estimate", estimates_json(found))
    else:
        print_estimates(found, stdout_console())
