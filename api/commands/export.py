"""``autoparallel export``: the weights of a checkpoint in other formats."""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import TrustOption

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="a checkpoint, or a folder whose newest checkpoint is used"
    ),
]
ToOption = Annotated[
    str,
    typer.Option(
        "--to", help="safetensors, pt, hf (for from_pretrained) or peft (LoRA adapters alone)"
    ),
]
FolderOption = Annotated[str, typer.Option("-o", "--output", help="the folder to write")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="TARGET", help="the trained model; default: the target of the run's plan"
    ),
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=8,alpha=16",
        help="the adapters' settings; default: those of the run's plan",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16, fp16 or fp64; default: as stored")
]
ShardSizeOption = Annotated[
    str, typer.Option("--max-shard-size", help="largest size of one file of tensors: 5GB, 500MB")
]
ForceOption = Annotated[bool, typer.Option("--force", help="replace the folder's contents")]


def export(
    checkpoint: CheckpointArgument,
    *,
    to: ToOption = "safetensors",
    output: FolderOption,
    model: ModelOption = None,
    lora: LoraOption = None,
    dtype: DtypeOption = None,
    max_shard_size: ShardSizeOption = "5GB",
    force: ForceOption = False,
    trust: TrustOption = False,
) -> None:
    """Write the weights of a checkpoint for other programs."""
    from autoparallel.exporting import export as write

    done = write(
        checkpoint, output, to=to, model=model, lora=lora, dtype=dtype,
        max_shard_size=max_shard_size, force=force, trust=trust,
    )  # fmt: skip
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    typer.echo(
        f"{done.folder}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, in {files}"
    )
