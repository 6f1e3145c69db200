"""``autoparallel run`` and ``verify``: train by a plan, or compare it with one device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from autoparallel.actions.terminal import stdout_console, with_lora
from autoparallel.options.hosts import asked_hosts
from autoparallel.options.outputs import check_output_file, check_output_folder
from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import PlanOptions, without_servers
from autoparallel.options.progress import progress
from autoparallel.options.results import others_on_stderr
from autoparallel.options.run_options import (
    HostOptions,
    RunOptions,
    Sources,
    absolute,
    checked_init,
)
from autoparallel.planner.errors import UsageError
from autoparallel.planning.plan import find_cluster, what_servers_lack
from autoparallel.planning.plan_files import load_plan, save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.report import ONE_SCREEN, print_report
from autoparallel.target.load import load_target
from autoparallel.target.trust import check_trusted
from autoparallel.training.run_setup import check_run_options
from autoparallel.training.start import (
    Start,
    check_devices_here,
    check_weights,
    start_training,
    start_verification,
)
from autoparallel.training.steps import Saving
from autoparallel.training.text_data import check_text
from autoparallel.training.trace import check_trace


def run(
    source: str,
    *,
    steps: int,
    seed: int,
    cluster: str,
    options: PlanOptions,
    output: str | None,
    settings: list[str] | None,
    lora: str | None,
    sources: Sources,
    save: str | None,
    save_every: int | None,
    keep: int | None,
    save_async: bool,
    resume: str | None,
    timeout: float,
    training: RunOptions,
    trust: bool,
    max_restarts: int,
    hosts: HostOptions,
) -> None:
    """Train by the plan file ``source``, or by a plan made for the target ``source``."""
    training = replace(
        training,
        compiled=options.compiled,
        elastic=_limits(options) if hosts.elastic else None,
    )
    check_run_options(training)
    if training.trace_steps or training.trace is not None:
        check_trace(training.trace_steps, training.trace, steps)
    checked_init(sources.init)
    if save is None and (save_every is not None or keep is not None or save_async):
        raise UsageError(
            "AP891", "--save-every, --keep and --save-async need --save DIR", fix="add --save DIR"
        )
    check_output_file(output)
    check_output_file(training.trace, "--trace")
    check_output_file(training.metrics, "--metrics")
    check_output_file(training.count_routing, "--count-routing")
    check_output_folder(save, "--save")
    if sources.weights is not None:
        check_weights(sources.weights, resume)
    if what_servers_lack(training, {"saving": save, "resume": resume}):
        options = without_servers(options)
    settings = with_lora(settings, lora)
    joined = asked_hosts(hosts, source)
    if sources.data is not None:
        check_text(sources.data)
    planned = partial(plan_path, source, cluster, options, settings=settings, trust=trust)
    with planned(output=output, data=sources.data, is_here=joined is None) as path:
        saving = None
        if save is not None:
            saving = Saving(save, every=save_every, keep=keep, asynchronous=save_async)
        start_training(
            path,
            steps=steps,
            seed=seed,
            saving=saving,
            resume=resume,
            options=training,
            sources=sources,
            start=Start(timeout, max_restarts, joined),
        )


def _limits(options: PlanOptions) -> dict[str, object]:
    """Return the limits and price sources, by option, that replanning uses when a host has left."""
    return {
        "time_limit_seconds": options.time_limit_seconds,
        "memory_limit_bytes": options.memory_limit_bytes,
        "profile": options.profile,
        "database": options.database,
        "routing": absolute(options.routing),
        "lengths": absolute(options.lengths),
    }


@contextmanager
def plan_path(
    source: str,
    cluster: str,
    options: PlanOptions,
    *,
    settings: list[str] | None,
    output: str | None = None,
    quiet: bool = False,
    trust: bool = False,
    data: str | None = None,
    is_here: bool = True,
) -> Iterator[Path]:
    """Yield the path of the plan file ``source``, or of a plan made for the target ``source``.

    A made plan's report goes to stdout unless ``quiet``; without ``output`` its file is in a
    temporary folder until the block ends. ``data`` is the path of the text to train on; ``is_here``
    says that all devices of the plan must be in this machine.

    Raises UsageError AP116 for a target under torchrun, where every process would plan, and AP155
    for a plan file whose target is not trusted.
    """
    if source.endswith(".json") and not source.startswith("hf:"):
        check_trusted(load_plan(source), source, trust=trust)
        yield Path(source)
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UsageError(
            "AP116",
            "a target cannot be planned under torchrun",
            why="every process would plan separately",
            fix=f"autoparallel plan {source} -o plan.json, then torchrun with plan.json",
        )

    with others_on_stderr():
        loaded = load_target(source, parse_settings(settings or ()))
        if data is not None:
            check_text(data, loaded)
        if is_here and cluster != "local":
            check_devices_here(find_cluster(cluster))
        with progress() as observe:
            plan = make_plan(loaded, cluster, options, observe)
    if not quiet:
        print_report(plan, stdout_console(), ONE_SCREEN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(output) if output is not None else Path(folder) / "plan.json"
        save_plan(plan, path)
        yield path


def verify(
    source: str,
    *,
    dtype: str,
    cluster: str,
    options: PlanOptions,
    settings: list[str] | None,
    lora: str | None,
    json: bool,
    timeout: float,
    trust: bool,
    hosts: HostOptions,
) -> None:
    """Compare two training steps of a plan (loss, gradients, weights) with steps of one device."""
    settings = with_lora(settings, lora)
    start = Start(timeout_seconds=timeout, hosts=asked_hosts(hosts, source))
    planned = partial(plan_path, source, cluster, options, settings=settings, trust=trust)
    with planned(quiet=True, is_here=start.hosts is None) as path:
        start_verification(
            path, dtype=dtype, json_output=json, compiled=options.compiled, start=start
        )
