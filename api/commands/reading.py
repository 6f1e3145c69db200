"""Commands that read plans.

Declarations: ``actions`` carries them out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import (
    DatabaseOption,
    JsonOption,
    PlanArgument,
    TrustOption,
    command,
)


@command("inspect")
def inspect(
    plan: PlanArgument,
    stages: Annotated[bool, typer.Option("--stages", help="add every stage")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="add the memory of the fullest rank by category")
    ] = False,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="add all other candidates of the search")
    ] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="add the layout of every weight, and what it costs")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="all of these, and the sources")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="write the report as one page of HTML"),
    ] = None,
    target: Annotated[
        bool,
        typer.Option(
            "--target/--no-target",
            help="with --html: load the plan's model, which runs its file, for baselines, "
            "roofline and memory in time",
        ),
    ] = True,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Show a plan: what, where, how fast, how sure, what next; details on request."""


@command("explain")
def explain(
    plan: PlanArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="a parameter, op, module or block; 'stage 0'; zero, offload, recompute, schedule, "
            "microbatches",
        ),
    ] = "",
    why_not: Annotated[
        str | None,
        typer.Option(
            "--why-not", metavar="tp=4,pp=2", help="plan again with this forced, and say what loses"
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="FIGURE=VALUE",
            help="plan again for a changed cluster: link.inter.bytes_per_second=50e9, "
            "device.memory_bytes=40GiB, device.peak.bfloat16=*2; repeatable",
        ),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option("--measured", metavar="FILE", help="a file of run --metrics to compare with"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="FILE",
            help="lengths of sequences, one on each line: the price of padding, and of buckets",
        ),
    ] = None,
    database: DatabaseOption = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="seconds for planning again")
    ] = 20.0,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Explain a plan: the alternatives at a place, priced, or what a change would make of it."""


@command("compare")
def compare(
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="ITEM…",
            help="plan files, files of run --metrics, folders of run --save, or baselines: ddp, "
            "fsdp, zero1, tp8, pp4, 3d:tp=8,pp=4",
        ),
    ],
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="write the comparison as one page of HTML"),
    ] = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Compare plans, runs and baselines with the first of them."""


@command("export")
def program(
    plan: PlanArgument,
    *,
    stage: Annotated[int, typer.Option("--stage", help="which stage of the plan, from 0 on")] = 0,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="time (of a micro-batch, within the memory limit), unlimited (time, without one)"
            " or memory",
        ),
    ] = "time",
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="memory per device: 72GiB, 80GB")
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="what to write: .lp or .mps")
    ],
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            help="source of times: auto (measured where available), measured (all) or analytic",
        ),
    ] = "auto",
    database: DatabaseOption = None,
    trust: TrustOption = False,
) -> None:
    """Write the integer program of a plan's stage, for any solver."""


@command("export")
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="a checkpoint, or a folder whose newest checkpoint is used; or a plan file",
        ),
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="of a checkpoint: safetensors (the default), pt, hf (for from_pretrained) or peft "
            "(LoRA adapters alone); of a plan: python (a script without this package), torchtitan, "
            "megatron, deepspeed, accelerate or transformers",
        ),
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="the folder to write")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="TARGET",
            help="the trained model; default: the target of the run's plan",
        ),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="r=8,alpha=16",
            help="the adapters' settings; default: those of the run's plan",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16, fp16 or fp64; default: as stored")
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option("--max-shard-size", help="largest size of one file of tensors: 5GB, 500MB"),
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="replace the folder's contents")] = False,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Write the weights of a checkpoint, or a plan, for other programs."""
