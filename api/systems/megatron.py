"""Megatron-LM: arguments for its ``pretrain_gpt.py``, and a script that starts it.

The names are of core_v0.19.0. Source: ``megatron/training/arguments.py`` and
``megatron/core/transformer/pipeline_parallel_layer_layout.py`` of that tag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoparallel.planner.configured.configuration import Configuration
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

ARGUMENTS, SCRIPT = "args.txt", "train.sh"
SCHEDULES = ("1f1b", "interleaved")
MODELS = ("llama", "mistral", "qwen2", "mixtral", "gpt2")
"""Hugging Face architectures that ``pretrain_gpt.py`` can build from arguments."""

Arguments = list[tuple[str, ...]]
"""Command-line arguments, each a name with its value if it takes one."""

LIMITS = {
    **PIPELINES,
    "gpipe": "1F1B",
    "eager-1f1b": "1F1B",
    "zb-h1": "1F1B, interleaved where there are several stages per rank",
    "zb-h2": "1F1B",
    "bfs": "interleaved 1F1B",
    "zbv": "interleaved 1F1B: stage s is on rank s mod pp, not in a V",
    "dualpipev": "interleaved 1F1B: stage s is on rank s mod pp, not in a V",
    "selective": "recomputation of its norms (recompute-modules layernorm), which keeps more than "
    "the plan's and is priced as if nothing were recomputed; where that does not fit, full "
    "recomputation",
    "device-order": "ranks in the order tensor, context, expert, data, pipeline",
    "adam": "Adam with decoupled weight decay (AdamW), the same without weight decay",
    "compile": "its own fused kernels",
}


def write(job: WriterInput) -> Files:
    """Return the files for Megatron-LM that train a configuration."""
    own, lost, notes = job.configuration, list[Deviation](), list[str]()
    arguments: Arguments = [
        *_degrees(own),
        *_pipeline(own, job.num_layers),
        *_batch(job),
        *_states(own),
        *_recomputation(own, job.num_layers),
        *_precision(own),
        *_optimizer(own),
    ]
    if job.config is not None and job.config.kind in MODELS:
        arguments += model_arguments(job.config)
        notes += list(_unlike(job.config))
    elif job.config is not None:
        notes.append(
            f"pretrain_gpt.py has no {job.config.kind}: the model's arguments are left to you"
        )
    if own.pp > 1 and own.zero > 1:
        lost.append(
            Deviation(
                f"ZeRO {own.zero} beside a pipeline",
                "the distributed optimizer, which is ZeRO 1",
            )
        )
    if own.precision == "fp16" and own.gradient_dtype == "compute":
        lost.append(Deviation("gradients summed in fp16", "gradients summed in float32"))
    text = "".join("=".join(argument) + "\n" for argument in arguments)
    start = (
        f"MEGATRON=path/to/Megatron-LM bash {job.folder / SCRIPT} --mock-data --train-iters 100 "
        "--lr 1e-4 --tokenizer-type NullTokenizer"
    )
    notes += ["what follows train.sh is passed on: data, tokenizer, learning rate, steps", RECIPE]
    return Files({ARGUMENTS: text, SCRIPT: script(job)}, start, tuple(lost), tuple(notes))


def to_supported(own: Configuration) -> Configuration:
    """Return the configuration with options that Megatron-LM can run, keeping its degrees."""
    if own.pp > 1 and (own.schedule not in SCHEDULES or not _interleaves(own)):
        own = with_schedule(own, "interleaved" if _interleaves(own) else "1f1b")
    if own.pp > 1 and own.zero > 1:
        own = replace(own, zero=1)
    if own.recompute == "selective":
        own = replace(own, recompute_share=1.0)
    return replace(
        own,
        recomputes_ends=False,
        precision="fp32" if own.precision == "fp64" else own.precision,
        sequence_parallel=True if own.ep > 1 and own.tp > 1 else own.sequence_parallel,
    )


def _interleaves(own: Configuration) -> bool:
    """Return whether Megatron-LM's interleaved schedule accepts the micro-batches and chunks."""
    return own.num_chunks > 1 and own.num_microbatches % own.pp == 0


def with_schedule(own: Configuration, schedule: str) -> Configuration:
    """Return the configuration with another schedule; for 1F1B a rank's chunks become one stage.

    >>> own = Configuration(pp=2, num_chunks=2, layers=(1, 2, 3, 4), schedule="zbv")
    >>> with_schedule(own, "1f1b").layers
    (3, 7)
    """
    if schedule != "1f1b" or own.num_chunks == 1:
        return replace(own, schedule=schedule)
    layers = own.layers
    if layers is not None and len(layers) == own.num_stages:
        step = own.num_chunks
        layers = tuple(sum(layers[at : at + step]) for at in range(0, len(layers), step))
    return replace(own, schedule="1f1b", num_chunks=1, layers=layers)


def _degrees(own: Configuration) -> Iterator[tuple[str, ...]]:
    yield "--tensor-model-parallel-size", str(own.tp)
    yield "--pipeline-model-parallel-size", str(own.pp)
    yield "--context-parallel-size", str(own.cp)
    if own.sequence_parallel and own.tp > 1:
        yield ("--sequence-parallel",)
    if own.ep > 1:
        yield "--expert-model-parallel-size", str(own.ep)
        if own.etp is not None:
            yield "--expert-tensor-parallel-size", str(own.etp)


def _pipeline(own: Configuration, num_layers: int) -> Iterator[tuple[str, ...]]:
    if own.pp == 1:
        return
    layers = stage_layers(own, num_layers)
    if own.num_chunks == 1 and len(set(layers)) == 1:
        return
    yield "--pipeline-model-parallel-layout", layout_text(layers)


def layout_text(layers: tuple[int, ...]) -> str:
    """Write the layers of each stage: E is the embedding, t a layer, L the loss.

    >>> layout_text((2, 1, 0, 3))
    'Ett|t||tttL'
    """
    return "E" + "|".join("t" * count for count in layers) + "L"


def _batch(job: WriterInput) -> Iterator[tuple[str, ...]]:
    own, seq = job.configuration, job.plan.model.seq
    yield "--micro-batch-size", str(own.rank_rows)
    yield "--global-batch-size", str(job.plan.model.global_batch)
    if seq is not None:
        yield "--seq-length", str(seq)
        positions = max(seq, job.config.max_positions if job.config else 0)
        yield "--max-position-embeddings", str(positions)


def _states(own: Configuration) -> Iterator[tuple[str, ...]]:
    if own.dp * own.cp > 1:
        yield ("--overlap-grad-reduce",)
    if own.zero == 1:
        yield ("--use-distributed-optimizer",)
        if own.dp * own.cp > 1:
            yield ("--overlap-param-gather",)
    if own.zero > 1:
        yield ("--use-distributed-optimizer",)
        yield ("--use-megatron-fsdp",)
        kind = "optim_grads" if own.zero == 2 else "optim_grads_params"
        yield "--data-parallel-sharding-strategy", kind
        yield "--ckpt-format", "fsdp_dtensor"
        yield ("--no-gradient-accumulation-fusion",)
    if own.offload == "optimizer":
        yield ("--optimizer-cpu-offload",)
        yield "--optimizer-offload-fraction", "1.0"
        yield ("--use-precision-aware-optimizer",)
        if own.zero == 0:
            yield ("--use-distributed-optimizer",)


def _recomputation(own: Configuration, num_layers: int) -> Iterator[tuple[str, ...]]:
    if own.recompute == "selective":
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", "layernorm"
    elif own.recompute == "full":
        most = max(stage_layers(own, num_layers))
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block"
        yield "--recompute-num-layers", str(-(-round(most * own.recompute_share * 1000) // 1000))


def _precision(own: Configuration) -> Iterator[tuple[str, ...]]:
    if own.precision in ("bf16", "fp8"):
        yield ("--bf16",)
        if own.gradient_dtype == "compute":
            yield ("--grad-reduce-in-bf16",)
    if own.precision == "fp8":
        yield "--fp8-format", "hybrid"
    if own.precision == "fp16":
        yield ("--fp16",)


def _optimizer(own: Configuration) -> Iterator[tuple[str, ...]]:
    if own.optimizer.startswith("sgd"):
        yield "--optimizer", "sgd"
        yield "--sgd-momentum", "0.9" if own.optimizer == "sgd-momentum" else "0.0"
    else:
        yield "--optimizer", "adam"


def model_arguments(config: ModelConfig) -> Arguments:
    """Return Megatron-LM's command-line arguments for the model's sizes and variants."""
    found: Arguments = [
        ("--num-layers", str(config.num_layers)),
        ("--hidden-size", str(config.hidden_size)),
        ("--ffn-hidden-size", str(config.intermediate_size)),
        ("--num-attention-heads", str(config.num_heads)),
        ("--kv-channels", str(config.head_dim)),
        ("--vocab-size", str(config.vocab_size)),
        ("--norm-epsilon", repr(config.norm_epsilon)),
        ("--attention-dropout", repr(config.attention_dropout)),
        ("--hidden-dropout", repr(config.hidden_dropout)),
    ]
    if config.kind == "gpt2":
        return [*found, ("--position-embedding-type", "learned_absolute")]
    if config.num_kv_heads != config.num_heads:
        found += [("--group-query-attention",), ("--num-query-groups", str(config.num_kv_heads))]
    found += [
        ("--normalization", "RMSNorm"),
        ("--swiglu",),
        ("--disable-bias-linear",),
        ("--position-embedding-type", "rope"),
    ]
    if config.rope_theta is not None:
        found.append(("--rotary-base", str(round(config.rope_theta))))
    if (scaling := config.rope_scaling) is not None and scaling.kind == "llama3":
        found += [("--use-rope-scaling",), ("--rope-scaling-factor", repr(scaling.factor))]
    if config.kind == "qwen2":
        found.append(("--add-qkv-bias",))
    if not config.is_tied:
        found.append(("--untie-embeddings-and-output-weights",))
    if config.num_experts:
        found += [
            ("--num-experts", str(config.num_experts)),
            ("--moe-router-topk", str(config.experts_per_token)),
            ("--moe-ffn-hidden-size", str(config.intermediate_size)),
            ("--moe-grouped-gemm",),
            ("--moe-token-dispatcher-type", "alltoall"),
        ]
    return found


def _unlike(config: ModelConfig) -> Iterator[str]:
    if config.window is not None:
        yield f"attention over a window of {config.window} positions: give --window-size"
    if config.kind == "gpt2":
        if not config.is_tied:
            yield "the output weights are not tied: give --untie-embeddings-and-output-weights"
        return
    yield from (f"the model has {text}: {ARGUMENTS} has not" for text in unlike_llama(config))
    scaling = config.rope_scaling
    if scaling is not None and scaling != RopeScaling(scaling.kind, scaling.factor):
        yield (
            f"the model scales rotary positions by low and high factors of "
            f"{scaling.low_freq_factor:g} and {scaling.high_freq_factor:g} from "
            f"{scaling.original_positions} positions: Megatron-LM by 1 and 4 from 8192"
        )


def script(job: WriterInput) -> str:
    """Write a shell script that starts Megatron-LM with the arguments file on each host."""
    own = job.configuration
    connections = "" if own.zero > 1 else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    nodes = ""
    if job.num_hosts > 1:
        nodes = (
            f'--nnodes {job.num_hosts} --node-rank "${{NODE_RANK:?}}" '
            '--master-addr "${MASTER_ADDR:?}" --master-port "${MASTER_PORT:-29500}" '
        )
    return f"""#!/usr/bin/env bash
# Written by autoparallel export --to megatron, for Megatron-LM core_v0.19.0.
set -euo pipefail
folder=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
mapfile -t arguments < "$folder/{ARGUMENTS}"
{connections}exec torchrun {nodes}--nproc-per-node {job.devices_per_host} \\
  "${{MEGATRON:?set it to the folder of Megatron-LM}}/pretrain_gpt.py" "${{arguments[@]}}" "$@"
"""


SYSTEM = System(
    "Megatron-LM", "core_v0.19.0", LIMITS, write, to_supported, builds_model=True, selects_less=True
)
