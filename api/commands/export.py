"""``autoparallel export``: a checkpoint's weights, or a plan, in the formats of other programs."""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import JsonOption, TrustOption, print_json

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="a checkpoint, or a folder whose newest checkpoint is used; or a plan file",
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        help="of a checkpoint: safetensors (the default), pt, hf (for from_pretrained) or peft "
        "(LoRA adapters alone); of a plan: python (a script without this package), torchtitan, "
        "megatron, deepspeed, accelerate or transformers",
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
    source: SourceArgument,
    *,
    to: ToOption = None,
    output: FolderOption,
    model: ModelOption = None,
    lora: LoraOption = None,
    dtype: DtypeOption = None,
    max_shard_size: ShardSizeOption = "5GB",
    force: ForceOption = False,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Write the weights of a checkpoint, or a plan, for other programs."""
    from autoparallel.exporting.plans import check_plan_options, export_plan, is_plan_format

    if is_plan_format(to, source):
        assert to is not None
        own = {"--model": model, "--lora": lora, "--dtype": dtype}
        check_plan_options(name for name, value in own.items() if value is not None)
        wrote = export_plan(source, output, to=to, force=force, trust=trust)
        if json:
            print_json({"files": wrote.files, "start": wrote.start, **wrote.facts})
        else:
            typer.echo(f"{output}: {', '.join(wrote.files)}")
            typer.echo("\n".join(filter(None, (f"start: {wrote.start}", wrote.report))))
        return
    from autoparallel.exporting.weights import export as write

    done = write(
        source, output, to=to or "safetensors", model=model, lora=lora, dtype=dtype,
        max_shard_size=max_shard_size, force=force, trust=trust,
    )  # fmt: skip
    if json:
        names = [file.name for file in done.files]
        print_json({"files": names, "tensors": done.num_tensors, "bytes": done.num_bytes})
        return
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    typer.echo(
        f"{done.folder}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, in {files}"
    )
