"""Commands that plan, estimate and list what plans are made of.

Declarations: ``actions`` carries them out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import (
    ClusterOption,
    JsonOption,
    LoraOption,
    SetOption,
    SortOption,
    TargetArgument,
    command,
)
from autoparallel.options.plan_options import PlanOptions

SEARCHED = (
    "compile",
    "memory_limit",
    "parallel",
    "stage_at",
    "max_tp",
    "allow",
    "deny",
    "objective",
    "price",
    "deadline",
    "gap",
    "tolerance",
    "time_limit",
    "num_candidates",
    "search",
    "solver",
    "measure_seconds",
)
"""Options of planning that have no meaning for a single given configuration."""


@command("plan")
def plan(
    target: TargetArgument,
    *,
    cluster: ClusterOption = "local",
    options: PlanOptions,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="file to write the plan to")
    ] = None,
    settings: SetOption = None,
    lora: LoraOption = None,
    json: JsonOption = False,
    check: Annotated[
        bool, typer.Option("--check", help="check the model file without planning")
    ] = False,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="neither read nor write the cache of earlier searches"),
    ] = False,
) -> None:
    """Find the fastest way to train TARGET on a cluster."""


@command("estimate")
def estimate(
    target: TargetArgument,
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            metavar="NAME,…",
            help="devices by name; or clusters (8xH100), each taken as it is",
        ),
    ] = "RTX4090,A100-80GB,H100",
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="tokens to train on, for days and dollars: 15e12, 15T, 300B"),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="[DEVICE=]DOLLARS",
            help="price per device and hour; default: the cluster file's",
        ),
    ] = None,
    global_batch: Annotated[
        int, typer.Option("--global-batch", min=1, help="samples per step")
    ] = 64,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="sequence length")] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="as for plan; default: bf16, on devices without it fp16"),
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="adamw, adam, sgd or sgd-momentum")
    ] = "adamw",
    lora: Annotated[
        str,
        typer.Option(
            "--lora", metavar="r=8,alpha=16", help="the adapters of an hf: target, or none"
        ),
    ] = "r=8,alpha=16",
    max_devices: Annotated[
        int, typer.Option("--max-devices", min=1, help="the most devices that are tried")
    ] = 1024,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="limit of each search")
    ] = 30.0,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            max=2,
            help="how many searches run at once; default: 2 if there are 2 cores",
        ),
    ] = None,
    sort: SortOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate how many devices TARGET needs for training and for LoRA, and how long it takes."""


@command("simulate", without=SEARCHED)
def simulate(
    target: TargetArgument,
    *,
    cluster: ClusterOption = "local",
    parallel: Annotated[
        str,
        typer.Option(
            "--parallel",
            help="the configuration, joined by commas: dp=2,tp=2,pp=2 cp=1 ep=1 zero=1 "
            "shard=2 recompute=full microbatches=8 schedule=1f1b chunks=1; default: dp takes the "
            "remaining devices, the others are 1 or none",
        ),
    ] = "",
    options: PlanOptions,
    layers_per_stage: Annotated[
        str | None,
        typer.Option(
            "--layers-per-stage", metavar="N,N,…", help="layers of each stage; default: even"
        ),
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap",
            help="whether collectives of gradients and of ZeRO run beside compute, as they do in "
            "a run",
        ),
    ] = True,
    slowdown: Annotated[
        float | None,
        typer.Option(
            "--slowdown",
            min=1.0,
            help="factor by which such a collective slows compute; default: the device's",
        ),
    ] = None,
    priced_as: Annotated[
        str,
        typer.Option(
            "--as",
            help="whose training is priced: run (this package's), megatron, torchtitan or "
            "deepspeed; the options below say otherwise",
        ),
    ] = "run",
    recompute_parts: Annotated[
        str | None,
        typer.Option(
            "--recompute-parts",
            metavar="NAME,NAME…",
            help="what of a layer runs again, by Megatron-LM's names: core_attn, layernorm, "
            "mla_up_proj, mlp, moe, moe_act, shared_experts, ssm",
        ),
    ] = None,
    dispatcher: Annotated[
        str | None,
        typer.Option(
            "--dispatcher",
            help="how tokens come to experts that ep splits: alltoall (NCCL), as run does, gather, "
            "deepep or hybridep (once to each host)",
        ),
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(
            "--imbalance",
            min=1.0,
            help="tokens of the rank whose experts have the most, over the mean; 1.5 to 1.7 where"
            " a router decides freely",
        ),
    ] = 1.0,
    scaling: Annotated[
        str | None,
        typer.Option(
            "--scaling",
            help="of products in fp8: tensorwise, as run does, rowwise, mxfp8 or nvfp4",
        ),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            help="eager: one for each op; compiled: as torch.compile fuses them; fused: also over"
            " the products of experts, and of attention and state-space layers that are "
            "written out",
        ),
    ] = None,
    lora: LoraOption = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev"),
    ] = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate a configuration that you choose: step time, memory, timeline."""


@command("listings")
def schedules(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="the schedule to draw; default: list all")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="also the schedules that this target registers")
    ] = None,
    stages: Annotated[int, typer.Option("--stages", min=1, help="number of pipeline ranks")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", min=1, help="micro-batches")] = 8,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks", min=1, help="stages per rank; default: the fewest that the schedule takes"
        ),
    ] = None,
    slices: Annotated[
        int, typer.Option("--slices", min=1, help="equal slices of a sequence, for terapipe")
    ] = 1,
    json: JsonOption = False,
) -> None:
    """List the pipeline schedules, or draw the timeline of one.

    In the drawing a forward, an input gradient and a weight gradient take equal time, a whole
    backward takes twice that, and messages take no time.
    """


@command("cluster")
def cluster(
    text: Annotated[
        str,
        typer.Argument(metavar="CLUSTER", help="local, 8xH100, 4x8xA100-80GB, cpu:4, a TOML file"),
    ] = "",
    json: JsonOption = False,
) -> None:
    """Show a cluster's figures and their sources; without CLUSTER, list the presets."""


@command("listings")
def ops(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="only ops whose name contains this")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="also list the ops that this target registers")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the ops with a sharding rule: their annotations and the dimensions that can be sharded.

    A letter is a dimension, *b any leading ones, _ one that is never split, [] an operand
    that only conditions the result. -> is linear in each factor; => is any function.
    An op without a rule is replicated on every rank; `inspect` shows what that costs.
    """
