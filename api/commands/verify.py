"""``autoparallel verify``: run a plan on real processes and compare it with one device."""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import (
    ClusterOption,
    DatabaseOption,
    GlobalBatchOption,
    JsonOption,
    MicroBatchOption,
    ParallelOption,
    ProfileOption,
    SeqOption,
    SetOption,
    TimeLimitOption,
    plan_options,
)
from autoparallel.commands.run import SourceArgument, plan_path

DtypeOption = Annotated[
    str, typer.Option("--dtype", help="fp64, where rounding hides nothing, or fp32")
]


def verify(
    source: SourceArgument,
    dtype: DtypeOption = "fp64",
    cluster: ClusterOption = "local",
    global_batch: GlobalBatchOption = 8,
    seq: SeqOption = None,
    micro_batch: MicroBatchOption = None,
    parallel: ParallelOption = None,
    time_limit: TimeLimitOption = 60.0,
    profile: ProfileOption = "auto",
    database: DatabaseOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Compare loss, every gradient and the weights after two steps with one device."""
    options = plan_options(
        global_batch=global_batch,
        seq=seq,
        micro_batch=micro_batch,
        precision="fp32",
        optimizer="adamw",
        memory_limit=None,
        parallel=parallel,
        time_limit=time_limit,
        profile=profile,
        database=database,
    )
    with plan_path(source, cluster, options, settings=settings, quiet=True) as path:
        from autoparallel.training import start_verification

        start_verification(path, dtype=dtype, json_output=json)
