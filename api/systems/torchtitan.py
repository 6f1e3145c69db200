"""torchtitan: a configuration in Python for ``--module`` and ``--config``, and a schedule as CSV.

The names are of the main branch of August 2026 (commit b5bcd76), whose configurations are Python
functions; release 0.2.2 was the last to read TOML. Source: ``torchtitan/config/configs.py``,
``torchtitan/trainer.py``, ``torchtitan/distributed/parallel_dims.py`` and ``pipeline_parallel.py``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from autoparallel.cost_model.simulator.actions import compute_only
from autoparallel.exporting.plans import torchrun
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.plan import Plan, Precision
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.systems.degrees import layers_of
from autoparallel.systems.python_text import Code, call, import_lines, literal
from autoparallel.systems.system import (
    PIPELINES,
    RECIPE,
    Deviation,
    Files,
    System,
    WriterInput,
    expert_differences,
    stage_layers,
    whole_shard,
)
from autoparallel.systems.torchtitan_models import (
    ModelText,
    missing_model,
    model_text,
    modules_of,
)

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of schedules in torch.distributed.pipelining, by this package's names."""

BY_TABLE = ("eager-1f1b", "zb-h1", "zb-h2")
"""Schedules that torchtitan can run from a table of actions in a CSV file."""

PRECISIONS: dict[Precision, Precision] = {"fp16": "bf16", "fp64": "fp32"}
"""Replacements for precisions that torchtitan does not support."""

CONFIG, TABLE = "planned_config.py", "schedule.csv"
FUNCTION = "planned"
"""Name of the function that returns the configuration."""

SEQ = 2048
"""Positions of a sequence where the plan has none: torchtitan's default."""

LIMITS = {
    **PIPELINES,
    "ring": "keys and values gathered, as by default; it passes them from rank to rank with "
    'context_parallel_rotate_method="alltoall"',
    "halo": "keys and values gathered",
    "ulysses": "keys and values gathered",
    "zero1": "FSDP that keeps parameters gathered between forward and backward; without a "
    "pipeline it sums gradients after every micro-batch",
    "zero2": "FSDP that keeps parameters gathered between forward and backward; beside a pipeline "
    "gradients are whole until the last micro-batch",
    "selective": "its own list of ops whose results are kept (SelectiveAC), which is longer "
    "than the plan's and priced as if nothing were recomputed; where that does not fit, "
    "full recomputation",
    "offload": "enable_cpu_offload, which offloads parameters and gradients too",
    "offload-gradients": "enable_cpu_offload, which offloads parameters too",
    "compute-gradients": "gradients reduced in float32",
    "device-order": "ranks in the order pipeline, data, context, tensor",
    "fp16": "bf16",
    "sgd": "AdamW",
    "sgd-momentum": "AdamW",
}


def write(job: WriterInput) -> Files:
    """Return the files for torchtitan that train a configuration."""
    own = job.configuration
    model = _model(job)
    layers = recomputed_layers(job.plan, own)
    parts = [_trainer(job, layers), model.text]
    if layers:
        parts.insert(0, SOME_LAYERS)
    text = "\n\n".join(parts)
    described = f"{job.plan.model.target}, planned for {job.plan.cluster.name}"
    lines = [
        f'"""{described}, as a configuration for torchtitan.\n',
        "Written by autoparallel export --to torchtitan, for its main branch of August 2026.\n"
        '"""\n',
        *import_lines(text, modules_of(model.family)),
    ]
    texts = {CONFIG: "\n".join(lines) + "\n\n\n" + text}
    if own.pp > 1 and own.schedule in BY_TABLE:
        texts[TABLE] = schedule_table(own)
    module = CONFIG.removesuffix(".py")
    start = (
        f"PYTHONPATH={job.folder} {torchrun(job.plan.cluster)} -m torchtitan.train "
        f"--module {module} --config {FUNCTION} --hf_assets_path TOKENIZER"
    )
    lost = (*_lost(job), *expert_differences(job), *model.lost)
    notes = [*model.notes, f"give the tokenizer's folder, and the dataset in {CONFIG}", RECIPE]
    return Files(texts, start, lost, tuple(notes))


def to_supported(own: Configuration) -> Configuration:
    """Return the configuration with options that torchtitan can run, keeping its degrees."""
    if own.pp > 1 and own.schedule not in (*SCHEDULES, *BY_TABLE):
        own = replace(own, schedule="1f1b")
    if own.schedule == "bfs" and own.num_chunks == 1:
        own = replace(own, schedule="gpipe")
    if own.schedule == "interleaved" and own.num_chunks == 1:
        own = replace(own, schedule="1f1b")
    if own.recompute == "selective":
        own = replace(own, recompute_share=1.0)
    if own.dp * own.cp > 1 and not _replicates(own) and own.zero != 3:
        own = replace(own, zero=1 if own.pp > 1 else 2)
    return replace(
        own,
        shard=whole_shard(own),
        etp=1 if own.ep > 1 else None,
        recomputes_ends=False,
        gradient_dtype="master",
        precision=PRECISIONS.get(own.precision, own.precision),
        optimizer=own.optimizer if own.optimizer in ("adam", "adamw") else "adamw",
    )


def _replicates(own: Configuration) -> bool:
    """Return whether data-parallel ranks hold whole states. torchtitan shards them over ranks of
    context parallelism, and it spreads no experts over ranks that replicate."""
    return own.zero == 0 and own.cp == 1 and own.ep == 1


def _lost(job: WriterInput) -> Iterator[Deviation]:
    own, plan = job.configuration, job.plan
    if own.zero and not any(stage.zero for stage in plan.stages) and own.dp * own.cp > 1:
        yield Deviation(
            "whole states on every data-parallel rank (ZeRO 0)",
            "FSDP that keeps parameters gathered, which context and expert parallelism need",
        )
    sums_once = own.shard_degree or (_replicates(own) and own.dp > 1)
    if sums_once and own.pp == 1 and own.num_microbatches > 1:
        yield Deviation("gradients summed once a step", "gradients summed after every micro-batch")


def recomputed_layers(plan: Plan, own: Configuration) -> tuple[int, ...]:
    """Return the indices of the layers that a plan recomputes, if these are some of them and the
    configuration does the same; else none."""
    if own.recompute != "full" or own.recompute_share == 1:
        return ()
    blocks = [block for stage in plan.stages for block in layers_of(plan, stage)]
    return tuple(index for index, block in enumerate(blocks) if block.recompute != "none")


SOME_LAYERS = '''class SomeLayers(FullAC):
    """Recomputes the layers of some indices."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: tuple[int, ...] = ()

    def _wrap_block(self, module, *, base_fqn=None):
        index = int(base_fqn.rpartition(".")[2])
        return super()._wrap_block(module) if index in self.config.layers else module
'''
"""Policy of torchtitan that recomputes the layers of a plan."""


def _trainer(job: WriterInput, layers: tuple[int, ...]) -> str:
    """Write the function that returns torchtitan's configuration."""
    own, model = job.configuration, job.plan.model
    seq = model.seq or SEQ
    training = call(
        "TrainingConfig",
        max_context_length=seq,
        num_tokens_per_microbatch_per_dp_rank=Code(f"{own.rank_rows} * {seq}"),
        num_tokens_per_train_step=Code(f"{model.global_batch} * {seq}"),
        mixed_precision_param="bfloat16" if own.precision in ("bf16", "fp8") else "float32",
        mixed_precision_reduce="float32",
        enable_cpu_offload=own.offload != "none",
        disable_cuda_graphs=True,
    )
    optimizer = call("default_adamw")
    if own.optimizer == "adam":
        group = call(
            "ParamGroupConfig",
            pattern=".*",
            optimizer_name="Adam",
            optimizer_kwargs={"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8},
        )
        optimizer = call("OptimizersContainer.Config", param_groups=Code(f"[{group}]"))
    vocab = job.config.vocab_size if job.config is not None else None
    data = call("ConcatThenSplitPackingConfig", dataset=Code('DATASETS["c4"]'))
    trainer = call(
        "Trainer.Config",
        model_spec=Code("model_spec()"),
        loss=call("CrossEntropyLoss.Config", global_vocab_size=vocab),
        dataloader=call("GrainDataLoader.Config", dataset=data),
        optimizer=optimizer,
        training=training,
        parallelism=call("ParallelismConfig", **_parallelism(job)),
        activation_checkpoint=_checkpointing(own, layers),
        compile=call("CompileConfig", enable=own.compiled, components=["model"]),
    )
    return (
        f"def {FUNCTION}() -> Trainer.Config:\n"
        '    """Return the planned configuration."""\n'
        + textwrap.indent(f"return {trainer}\n", "    ")
    )


def _parallelism(job: WriterInput) -> dict[str, object]:
    own = job.configuration
    shards = 1 if _replicates(own) else (own.shard_degree or own.dp * own.cp) // own.cp
    found: dict[str, object] = {
        "data_parallel_replicate_degree": own.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if own.zero == 3 else "never",
        "tensor_parallel_degree": own.tp,
        "enable_sequence_parallel": own.sequence_parallel is not False,
        "context_parallel_degree": own.cp,
        "expert_parallel_degree": own.ep,
        "pipeline_parallel_degree": own.pp,
    }
    if own.pp == 1:
        return found
    if own.schedule in BY_TABLE:
        table = Code(f'str(Path(__file__).with_name("{TABLE}"))')
        found |= {
            "pipeline_parallel_schedule": "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": table,
        }
    else:
        found["pipeline_parallel_schedule"] = SCHEDULES[own.schedule]
    names = module_names(stage_layers(own, job.num_layers))
    parts = "".join(f"    {literal(part)},\n" for part in names)
    return found | {
        "num_pp_microbatches": own.num_microbatches,
        "module_fqns_per_model_part": Code(f"[\n{parts}]"),
    }


def _checkpointing(own: Configuration, layers: tuple[int, ...]) -> Code:
    if layers:
        return call("SomeLayers.Config", layers=layers)
    names = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
    return Code(names[own.recompute])


def _model(job: WriterInput) -> ModelText:
    if job.config is None:
        return missing_model(
            "the plan's model is no Hugging Face configuration: write its ModelSpec"
        )
    return model_text(job.config, job.configuration, job.plan.model.seq or SEQ)


def module_names(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of each stage by their names in torchtitan's models.

    >>> module_names((1, 2))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]
    """
    found = [
        [f"layers.{index}" for index in range(*bounds)]
        for bounds in pairwise(accumulate(layers, initial=0))
    ]
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "lm_head"]
    return found


def schedule_table(own: Configuration) -> str:
    """Write the compute actions of each rank as a line, in the format of torch's pipelines."""
    schedule = build_schedule(
        own.schedule, own.num_stages, own.num_microbatches, num_chunks=own.num_chunks
    )
    lines = (
        ",".join(f"{each.stage}{each.kind}{each.microbatch}" for each in compute_only(row))
        for row in schedule.table
    )
    return "\n".join(lines) + "\n"


SYSTEM = System(
    "torchtitan",
    "main, August 2026",
    LIMITS,
    write,
    to_supported,
    builds_model=True,
    selects_less=True,
)
