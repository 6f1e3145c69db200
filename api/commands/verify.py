"""``autoparallel verify``: run a plan on real processes and compare it with one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.commands.hosts import (
    EndpointOption,
    JoinTimeoutOption,
    NumHostsOption,
    asked_hosts,
)
from autoparallel.commands.options import (
    ClusterOption,
    JsonOption,
    LoraOption,
    SetOption,
    TrustOption,
    planning,
    with_lora,
)
from autoparallel.commands.run import SourceArgument, plan_path

if TYPE_CHECKING:
    from autoparallel.planning.plan import PlanOptions

DtypeOption = Annotated[str, typer.Option("--dtype", help="fp64 (no rounding differences) or fp32")]


@planning(without=("precision", "float32_ops", "tf32"), global_batch=8, measure_seconds=0.0)
def verify(
    source: SourceArgument,
    *,
    dtype: DtypeOption = "fp64",
    cluster: ClusterOption = "local",
    options: PlanOptions,
    settings: SetOption = None,
    lora: LoraOption = None,
    json: JsonOption = False,
    trust: TrustOption = False,
    nnodes: NumHostsOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: JoinTimeoutOption = 600.0,
) -> None:
    """Compare loss, every gradient and the weights after two steps with one device."""
    settings = with_lora(settings, lora)
    hosts = asked_hosts(nnodes, rdzv_endpoint, join_timeout, False, source)
    with plan_path(source, cluster, options, settings=settings, quiet=True, trust=trust) as path:
        from autoparallel.training.start import Start, start_verification

        start_verification(
            path, dtype=dtype, json_output=json, compiled=options.compiled, start=Start(hosts=hosts)
        )
