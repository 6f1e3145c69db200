"""Commands that run plans.

Declarations: ``actions`` carries them out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import (
    ClusterOption,
    JsonOption,
    LoraOption,
    PlanArgument,
    PlanOrTargetArgument,
    SetOption,
    SetupOption,
    TimeoutOption,
    TrustOption,
    command,
)
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.run_options import HostOptions, RunOptions, Sources


@command("run", starts_others=True)
def run(
    source: PlanOrTargetArgument,
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, help="training steps")] = 20,
    seed: Annotated[
        int, typer.Option("--seed", help="seed of the initial weights and the data")
    ] = 0,
    cluster: ClusterOption = "local",
    options: PlanOptions,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="file to write the plan to")
    ] = None,
    settings: SetOption = None,
    lora: LoraOption = None,
    sources: Sources,
    save: Annotated[
        str | None, typer.Option("--save", metavar="DIR", help="write checkpoints into DIR")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option("--save-every", min=1, help="steps between checkpoints")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, metavar="N", help="keep only the newest N checkpoints"),
    ] = None,
    save_async: Annotated[
        bool, typer.Option("--save-async", help="write checkpoints in the background, from a copy")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="DIR", help="start from a checkpoint, of any plan"),
    ] = None,
    timeout: TimeoutOption = 600.0,
    training: RunOptions,
    trust: TrustOption = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            metavar="R",
            help="start all ranks again, so often, when one dies or hangs; from the last "
            "checkpoint",
        ),
    ] = 0,
    hosts: HostOptions,
) -> None:
    """Train by a plan; --cluster and what follows, up to --lora, are for planning a TARGET."""


@command(
    "run",
    starts_others=True,
    without=("precision", "float32_ops", "tf32", "elastic"),
    global_batch=8,
    measure_seconds=0.0,
)
def verify(
    source: PlanOrTargetArgument,
    *,
    dtype: Annotated[
        str, typer.Option("--dtype", help="fp64 (no rounding differences) or fp32")
    ] = "fp64",
    cluster: ClusterOption = "local",
    options: PlanOptions,
    settings: SetOption = None,
    lora: LoraOption = None,
    json: JsonOption = False,
    timeout: TimeoutOption = 600.0,
    trust: TrustOption = False,
    hosts: HostOptions,
) -> None:
    """Compare loss, every gradient and the weights after two steps with one device."""


@command("launch")
def launch(
    plan: PlanArgument,
    run_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- RUN_OPTIONS]", help="options of `autoparallel run`, after --"),
    ] = None,
    *,
    slurm: Annotated[bool, typer.Option("--slurm", help="a job for sbatch")] = False,
    k8s: Annotated[
        bool,
        typer.Option("--k8s", help="an Indexed Job with a headless Service, for kubectl apply"),
    ] = False,
    ssh: Annotated[
        bool, typer.Option("--ssh", help="a script that starts each host over ssh")
    ] = False,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR", help="folder to write the files to")
    ] = "launch",
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="A,B,…|FILE",
            help="names of the hosts in the plan's order; needed by --ssh, and where hosts differ",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="what the job is called")] = "autoparallel",
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm's partition")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm's account")] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="HH:MM:SS", help="Slurm's limit of time")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="container image of the pods, with this package")
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option("--claim", help="PersistentVolumeClaim that pods mount at --workdir"),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option(
            "--workdir", help="where the run starts, with the model's file; default: this folder"
        ),
    ] = None,
    setup: SetupOption = "",
    port: Annotated[
        int,
        typer.Option("--port", min=1, max=65534, help="first of two free ports of the first host"),
    ] = 29400,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="how often torchrun starts all ranks again")
    ] = 0,
) -> None:
    """Write the files that start a plan on every host: a check of the cluster, then the run."""
