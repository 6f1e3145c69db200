"""torchtitan: its job configuration as TOML, a schedule as CSV, and sizes of the model.

The names are of release 0.2.2, the last that reads TOML (from 0.3 on configurations are Python
functions). Source: ``torchtitan/config/job_config.py`` and
``torchtitan/distributed/pipeline_parallel.py`` of that release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

from autoparallel.cost_model.simulator.actions import compute_only
from autoparallel.exporting.plans import torchrun
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.plan import Precision
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.systems.model_config import ModelConfig, RopeScaling, unlike_llama
from autoparallel.systems.system import (
    PIPELINES,
    RECIPE,
    Deviation,
    Files,
    System,
    WriterInput,
    stage_layers,
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

TOML, TABLE, MODEL = "train.toml", "schedule.csv", "planned_model.py"

LIMITS = {
    **PIPELINES,
    "zero1": "FSDP that keeps parameters gathered between forward and backward; without a "
    "pipeline it sums gradients after every micro-batch",
    "zero2": "FSDP that keeps parameters gathered between forward and backward; beside a pipeline "
    "gradients are whole until the last micro-batch",
    "selective": "its own list of ops whose results are kept (selective_ac_option = op), which is "
    "longer than the plan's and priced as if nothing were recomputed; where that does not fit, "
    "full recomputation",
    "offload": "enable_cpu_offload, which offloads parameters and gradients too",
    "compute-gradients": "gradients reduced in float32",
    "device-order": "ranks in the order pipeline, data, context, tensor",
    "fp16": "bf16",
    "sgd": "AdamW",
    "sgd-momentum": "AdamW",
}


def write(job: WriterInput) -> Files:
    """Return the files for torchtitan that train a configuration."""
    own = job.configuration
    texts: dict[str, str] = {}
    lost: list[Deviation] = []
    notes: list[str] = []
    sections = _sections(job, lost)
    if own.pp > 1:
        sections["parallelism"] |= _pipeline(job)
        if own.schedule in BY_TABLE:
            texts[TABLE] = schedule_table(own)
    sections["model"], extra = _model(job.config, lost, notes)
    if extra:
        texts[MODEL] = extra
        sections["experimental"] = {"custom_import": MODEL.removesuffix(".py")}
    texts = {TOML: _toml(sections, own), **texts}
    path = f"PYTHONPATH={job.folder} " if extra else ""
    command = f"{torchrun(job.plan.cluster)} -m torchtitan.train"
    start = f"{path}{command} --job.config_file {job.folder / TOML}"
    notes += ["give the dataset and the tokenizer (model.hf_assets_path) in train.toml", RECIPE]
    return Files(texts, start, tuple(lost), tuple(notes))


def to_supported(own: Configuration) -> Configuration:
    """Return the configuration with options that torchtitan can run, keeping its degrees."""
    if own.pp > 1 and own.schedule not in (*SCHEDULES, *BY_TABLE):
        own = replace(own, schedule="1f1b")
    if own.schedule == "bfs" and own.num_chunks == 1:
        own = replace(own, schedule="gpipe")
    if own.schedule == "interleaved" and own.num_chunks == 1:
        own = replace(own, schedule="1f1b")
    if 0 < own.recompute_share < 1 and own.recompute == "full":
        own = replace(own, recompute_share=1 / every_nth(own.recompute_share))
    elif own.recompute != "none":
        own = replace(own, recompute_share=1.0)
    if _uses_fsdp(own) and own.zero != 3:
        own = replace(own, zero=1 if own.pp > 1 else 2)
    if own.num_devices > 1 and not _uses_fsdp(own) and not _uses_ddp(own):
        own = replace(own, zero=0, precision="fp32")
    return replace(
        own,
        recomputes_ends=False,
        gradient_dtype="master",
        precision=PRECISIONS.get(own.precision, own.precision),
        optimizer=own.optimizer if own.optimizer in ("adam", "adamw") else "adamw",
        sequence_parallel=True if own.tp > 1 else own.sequence_parallel,
    )


def _uses_ddp(own: Configuration) -> bool:
    """Return whether DDP trains the configuration: it has no ZeRO and no degree but "dp"."""
    return own.zero == 0 and own.num_devices == own.dp


def _uses_fsdp(own: Configuration) -> bool:
    """Return whether FSDP trains the configuration: it has ranks to shard over and does not use
    DDP."""
    return own.dp * own.cp > 1 and not _uses_ddp(own)


def every_nth(share: float) -> int:
    """Return n so that recomputing every n-th layer recomputes at least ``share`` of the layers.

    >>> every_nth(0.5), every_nth(0.4), every_nth(0.9)
    (2, 2, 1)
    """
    return max(1, int(1 / share + 1e-9))


def _sections(job: WriterInput, lost: list[Deviation]) -> dict[str, dict[str, object]]:
    own, plan = job.configuration, job.plan
    parts = own.dp
    uses_ddp = _uses_ddp(own)
    if own.zero and not any(stage.zero for stage in plan.stages) and parts * own.cp > 1:
        lost.append(
            Deviation(
                "whole states on every data-parallel rank (ZeRO 0)",
                "FSDP that keeps parameters gathered: it has no DDP beside other degrees",
            )
        )
    if own.precision == "fp32" and plan.model.precision not in ("fp32", "fp64"):
        lost.append(
            Deviation(
                f"{plan.model.precision} beside float32 masters",
                "float32, which is slower and larger: it has mixed precision only with FSDP or "
                "DDP, that is where dp or cp is more than 1",
            )
        )
    microbatch = own.rank_rows
    local = microbatch * own.num_microbatches if own.pp > 1 else microbatch
    half = own.precision in ("bf16", "fp8")
    return {
        "job": {"description": f"{plan.model.target}, planned for {plan.cluster.name}"},
        "model": {},
        "optimizer": {"name": "Adam" if own.optimizer == "adam" else "AdamW"},
        "training": {
            "local_batch_size": local,
            "global_batch_size": plan.model.global_batch,
            **({"seq_len": plan.model.seq} if plan.model.seq else {}),
            "mixed_precision_param": "bfloat16" if half else "float32",
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": own.offload == "optimizer",
        },
        "parallelism": {
            "data_parallel_replicate_degree": parts if uses_ddp else 1,
            "data_parallel_shard_degree": 1 if uses_ddp else parts,
            "fsdp_reshard_after_forward": "always" if own.zero == 3 else "never",
            "tensor_parallel_degree": own.tp,
            "context_parallel_degree": own.cp,
            "expert_parallel_degree": own.ep,
            "pipeline_parallel_degree": own.pp,
        },
        "activation_checkpoint": _checkpointing(own),
        "compile": {"enable": own.compiled},
    }


def _checkpointing(own: Configuration) -> dict[str, object]:
    if own.recompute == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    nth = every_nth(own.recompute_share)
    if own.recompute == "full" and nth > 1:
        return {"mode": "selective", "selective_ac_option": str(nth)}
    return {"mode": own.recompute}


def _pipeline(job: WriterInput) -> dict[str, object]:
    own = job.configuration
    by_table = own.schedule in BY_TABLE
    return {
        "pipeline_parallel_schedule": "PipelineScheduleMulti"
        if by_table
        else SCHEDULES[own.schedule],
        **({"pipeline_parallel_schedule_csv": str(job.folder / TABLE)} if by_table else {}),
        "pipeline_parallel_microbatch_size": own.rank_rows,
        "module_fqns_per_model_part": module_names(stage_layers(own, job.num_layers)),
    }


def module_names(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of each stage by their names in torchtitan's models.

    >>> module_names((1, 2))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
    """
    found = [
        [f"layers.{index}" for index in range(*bounds)]
        for bounds in pairwise(accumulate(layers, initial=0))
    ]
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
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


UNKNOWN = "SET_ME"
"""Placeholder that names no model, so that torchtitan stops instead of training another model."""

FLAVORS = {
    (4096, 32, 32, 8, 14336, 128256): "8B",
    (8192, 80, 64, 8, 28672, 128256): "70B",
    (16384, 126, 128, 8, 53248, 128256): "405B",
}
"""llama3 sizes known to torchtitan: hidden size, layers, heads, key heads, MLP size, vocabulary."""

FLAVOR_NORM_AND_ROPE = (1e-5, 500000.0, RopeScaling("llama3", factor=8.0))
"""Values shared by these sizes: norm epsilon, rotary base and its scaling (of Llama 3.1)."""


def _model(
    config: ModelConfig | None, lost: list[Deviation], notes: list[str]
) -> tuple[dict[str, object], str]:
    """Return the section ``model`` of the configuration, and a Python module's text that registers
    the model's sizes. Differences are added to ``lost``, tasks for the user to ``notes``."""
    if config is None or config.kind not in ("llama", "mistral"):
        kind = "" if config is None else f": its llama3 is not {config.kind}"
        notes.append(f"set model.name and model.flavor in train.toml{kind}")
        return {"name": UNKNOWN, "flavor": UNKNOWN}, ""
    notes += list(_unlike(config))
    key = (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.intermediate_size,
        config.vocab_size,
    )
    norm_and_rope = config.norm_epsilon, config.rope_theta, config.rope_scaling
    if key in FLAVORS and norm_and_rope == FLAVOR_NORM_AND_ROPE:
        return {"name": "llama3", "flavor": FLAVORS[key]}, ""
    multiple, multiplier = inner_size(config.hidden_size, config.intermediate_size)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        scaling = RopeScaling("llama3", factor=1.0)  # torchtitan scales by 8 unless told
    text = f'''"""The planned model's sizes, for torchtitan's llama3."""

from dataclasses import replace

from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import register_train_spec

ARGS = TransformerModelArgs(
    dim={config.hidden_size},
    n_layers={config.num_layers},
    n_heads={config.num_heads},
    n_kv_heads={config.num_kv_heads},
    vocab_size={config.vocab_size},
    multiple_of={multiple},
    ffn_dim_multiplier={multiplier!r},
    norm_eps={config.norm_epsilon!r},
    rope_theta={config.rope_theta!r},
    rope_scaling_args=RoPEScalingArgs(
        scaling_factor={scaling.factor!r},
        low_freq_factor={scaling.low_freq_factor!r},
        high_freq_factor={scaling.high_freq_factor!r},
        original_max_position_embeddings={scaling.original_positions},
    ),
)
register_train_spec("planned", replace(get_train_spec(), model_args={{"planned": ARGS}}))
'''
    return {"name": "planned", "flavor": "planned"}, text


def _unlike(config: ModelConfig) -> list[str]:
    found = {
        "one weight for embeddings and output": config.is_tied,
        "heads of another size than width over heads": config.head_dim * config.num_heads
        != config.hidden_size,
        f"attention over a window of {config.window} positions": config.window is not None,
        "dropout": bool(config.attention_dropout or config.hidden_dropout),
    }
    texts = [*(text for text, holds in found.items() if holds), *unlike_llama(config)]
    return [f"the model has {text}: torchtitan's llama3 has not" for text in texts]


def inner_size(hidden: int, intermediate: int) -> tuple[int, float]:
    """Return ``multiple_of`` and ``ffn_dim_multiplier`` for an MLP of ``intermediate`` channels.

    torchtitan computes multiple_of · ceil(int(multiplier · int(8 / 3 · hidden)) / multiple_of).

    >>> inner_size(4096, 14336)
    (2048, 1.2188)
    """
    multiple = intermediate & -intermediate
    base = int(2 * 4 * hidden / 3)
    multiplier = round((intermediate - multiple / 2) / base, 4)
    if -(-int(multiplier * base) // multiple) * multiple != intermediate:
        multiplier = intermediate / base
    return multiple, multiplier


def _toml(sections: Mapping[str, Mapping[str, object]], own: Configuration) -> str:
    lines = ["# Written by autoparallel export --to torchtitan, for torchtitan 0.2.2."]
    if own.precision == "fp8":
        sections = {**sections, "model": {**sections["model"], "converters": ["float8"]}}
    for name, values in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


SYSTEM = System(
    "torchtitan", "0.2.2", LIMITS, write, to_supported, builds_model=True, selects_less=True
)
