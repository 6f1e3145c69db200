"""Megatron-LM: arguments for its ``pretrain_gpt.py``, and a script that starts it.

The names are of the main branch of August 2026 (commit d98e8a6) and were compared with its
parser. Source: ``megatron/training/arguments.py``,
``megatron/core/transformer/transformer_config.py`` and the parser of pipeline layouts beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.graph.layout import OF_GROUPS, RING
from autoparallel.planner.plan import Plan
from autoparallel.systems.features import context_ways
from autoparallel.systems.model_config import (
    Experts,
    LatentAttention,
    ModelConfig,
    RopeScaling,
    unlike_llama,
)
from autoparallel.systems.system import (
    PIPELINES,
    RECIPE,
    Deviation,
    Files,
    System,
    WriterInput,
    expert_differences,
    stage_layers,
)

ARGUMENTS, SCRIPT = "args.txt", "train.sh"
SCHEDULES = ("1f1b", "interleaved")
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text")
MODELS = (*DENSE, *SPARSE, "olmoe", "granitemoe")
"""Hugging Face architectures that ``pretrain_gpt.py`` can build from arguments."""

Arguments = list[tuple[str, ...]]
"""Command-line arguments, each a name with its value if it takes one."""

OPTIMIZER_ALONE = "only masters and optimizer states in host memory"

LIMITS = {
    **PIPELINES,
    "gpipe": "1F1B",
    "eager-1f1b": "1F1B",
    "zb-h1": "1F1B, interleaved where there are several stages per rank",
    "zb-h2": "1F1B",
    "bfs": "interleaved 1F1B",
    "zbv": "interleaved 1F1B: stage s is on rank s mod pp, not in a V",
    "dualpipev": "interleaved 1F1B: stage s is on rank s mod pp, not in a V",
    "halo": "keys and values gathered",
    "selective": "recomputation of its norms (recompute-modules layernorm), which keeps more than "
    "the plan's and is priced as if nothing were recomputed; where that does not fit, full "
    "recomputation",
    "device-order": "ranks in the order tensor, context, expert, data, pipeline",
    "adam": "Adam with decoupled weight decay (AdamW), the same without weight decay",
    "offload-gradients": OPTIMIZER_ALONE,
    "offload-parameters": OPTIMIZER_ALONE,
    "compile": "its own fused kernels",
}


def write(job: WriterInput) -> Files:
    """Return the files for Megatron-LM that train a configuration."""
    own, notes = job.configuration, list[str]()
    if job.config is not None and job.config.kind == "gpt_oss" and own.tp > 1:
        own = with_whole_experts(own, job.config.experts)
    lost = [*expert_differences(replace(job, configuration=own)), *_context_differences(job.plan)]
    if job.config is not None and job.config.experts is not None and own.tp > 1:
        if not own.sequence_parallel:
            lost.append(Deviation("norms of whole sequences beside tp", "sequence parallelism"))
        own = replace(own, sequence_parallel=True)  # it refuses experts without
    arguments: Arguments = [
        *_degrees(own),
        *_context(own, job.plan),
        *_pipeline(own, job.num_layers),
        *_batch(job),
        *_states(own),
        *_recomputation(own, job.num_layers),
        *_precision(own),
        *_optimizer(own),
    ]
    if job.config is not None and job.config.kind in MODELS:
        arguments += model_arguments(job.config)
        lost += _unlike(job.config, job.plan.model.seq)
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
        etp=(own.etp or own.tp) if own.ep > 1 else None,
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


def with_whole_experts(own: Configuration, experts: Experts | None) -> Configuration:
    """Return the configuration with no expert split over tensor-parallel ranks, which Megatron-LM
    refuses for experts with biases: they are spread over these ranks where their number allows."""
    if own.etp == 1 or experts is None:
        return own
    ep = own.ep * own.tp
    return replace(own, ep=ep if experts.count % ep == 0 else own.ep, etp=1)


def _degrees(own: Configuration) -> Iterator[tuple[str, ...]]:
    yield "--tensor-model-parallel-size", str(own.tp)
    yield "--pipeline-model-parallel-size", str(own.pp)
    yield "--context-parallel-size", str(own.cp)
    if own.sequence_parallel and own.tp > 1:
        yield ("--sequence-parallel",)
    if own.ep > 1:
        yield "--expert-model-parallel-size", str(own.ep)
    if own.tp > 1 and own.etp is not None:
        yield "--expert-tensor-parallel-size", str(own.etp)


CONTEXT_TYPES = {RING: "p2p", "heads": "a2a", OF_GROUPS: "p2p"}
"""Values of ``--cp-comm-type``, by way of attention in the plan; all others gather keys and values.
An all-to-all needs as many heads of keys as ranks."""


def _context(own: Configuration, plan: Plan) -> Iterator[tuple[str, ...]]:
    if own.cp > 1:
        ways = context_ways(plan) or ("q",)
        yield "--cp-comm-type", CONTEXT_TYPES.get(ways[0], "all_gather")


def _context_differences(plan: Plan) -> Iterator[Deviation]:
    ways = context_ways(plan)
    if OF_GROUPS in ways:
        yield Deviation("attention by heads, of which keys have fewer than ranks", "ring attention")
    if len(ways) > 1:
        yield Deviation("several ways of attention on ranks of context parallelism", "the first")


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
    if own.shard_degree:
        groups = own.dp * own.cp // own.shard_degree
        yield "--num-distributed-optimizer-instances", str(groups)
        if own.zero > 1:
            yield "--outer-dp-sharding-strategy", "no_shard"
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
    if own.offload != "none":
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
        ("--kv-channels", str(config.latent.value_dim if config.latent else config.head_dim)),
        ("--vocab-size", str(config.vocab_size)),
        ("--norm-epsilon", repr(config.norm_epsilon)),
        ("--attention-dropout", repr(config.attention_dropout)),
        ("--hidden-dropout", repr(config.hidden_dropout)),
    ]
    if config.kind == "gpt2":
        return [*found, ("--position-embedding-type", "learned_absolute")]
    found += [("--normalization", "RMSNorm"), *_attention(config), *_positions(config)]
    if config.kind == "gpt_oss":
        found += [
            ("--quick-geglu",),
            ("--glu-linear-offset", "1.0"),
            ("--activation-func-clamp-value", repr(config.glu_limit)),
            ("--softmax-type", "learnable"),
        ]
    else:
        found += [("--swiglu",), ("--disable-bias-linear",)]
    if config.has_qkv_bias:
        found.append(("--add-qkv-bias",))
    if not config.is_tied:
        found.append(("--untie-embeddings-and-output-weights",))
    return [*found, *(_experts(config.experts) if config.experts is not None else ())]


def _attention(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    if config.latent is not None:
        yield from _latent_attention(config.latent)
    elif config.num_kv_heads != config.num_heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(config.num_kv_heads)
    if config.query_norm == "head" or config.latent is not None:
        yield ("--qk-layernorm",)
    if config.query_norm == "l2":
        yield ("--qk-l2-norm",)
    if config.window is not None:
        yield "--window-size", f"{config.window - 1},0"
        if len(config.windowed_layers) < config.num_layers:
            layers = set(config.windowed_layers)
            pattern = pattern_text([index in layers for index in range(config.num_layers)])
            yield "--window-attn-skip-freq", pattern


def _latent_attention(latent: LatentAttention) -> Iterator[tuple[str, ...]]:
    yield ("--multi-latent-attention",)
    if latent.query_rank:
        yield "--q-lora-rank", str(latent.query_rank)
    yield "--kv-lora-rank", str(latent.key_rank)
    yield "--qk-head-dim", str(latent.plain_dim)
    yield "--qk-pos-emb-head-dim", str(latent.rotary_dim)
    yield "--v-head-dim", str(latent.value_dim)


def _positions(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    scaling, yarn = config.rope_scaling, config.yarn
    kind = "rope" if yarn is None else "yarn"
    yield "--position-embedding-type", kind if config.latent is None else "rope"
    if config.rope_theta is not None:
        yield "--rotary-base", str(round(config.rope_theta))
    if config.rotary_share != 1:
        yield "--rotary-percent", repr(config.rotary_share)
    if config.latent is not None:
        yield "--rope-type", kind
        if yarn is None:
            yield ("--no-rope-fusion",)  # which it has for latent attention under yarn alone
    if config.kind == "llama4_text":
        yield ("--rotary-interleaved",)
    if not all(config.rotary_layers):
        yield "--no-rope-freq", pattern_text([not each for each in config.rotary_layers])
    if scaling is not None and scaling.kind == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", repr(scaling.factor)
    if yarn is not None:
        yield "--rotary-scaling-factor", repr(yarn.factor)
        yield "--mscale", repr(yarn.mscale)
        yield "--mscale-all-dim", repr(yarn.mscale_all_dim)
        if config.latent is None:
            yield "--yarn-original-max-position-embeddings", str(yarn.original_positions)
            yield "--yarn-beta-fast", repr(yarn.beta_fast)
            yield "--yarn-beta-slow", repr(yarn.beta_slow)
            if not yarn.truncate:
                yield ("--no-yarn-correction-range-round-to-int",)


def _experts(experts: Experts) -> Iterator[tuple[str, ...]]:
    yield "--num-experts", str(experts.count)
    if not all(experts.layers):
        yield "--moe-layer-freq", pattern_text(experts.layers)
    yield "--moe-ffn-hidden-size", str(experts.width)
    if experts.shared_width:
        yield "--moe-shared-expert-intermediate-size", str(experts.shared_width)
        if experts.gates_shared:
            yield ("--moe-shared-expert-gate",)
    yield "--moe-router-topk", str(experts.per_token)
    yield "--moe-router-score-function", experts.score
    if experts.score == "softmax" and (not experts.normalizes or experts.per_token == 1):
        yield ("--moe-router-pre-softmax",)
    if experts.score == "sigmoid":
        yield "--moe-router-dtype", "fp32"
    if experts.has_bias:
        yield ("--moe-router-enable-expert-bias",)
    if _limits_groups(experts):
        yield "--moe-router-num-groups", str(experts.num_groups)
        yield "--moe-router-group-topk", str(experts.chosen_groups)
    if experts.scale != 1:
        yield "--moe-router-topk-scaling-factor", repr(experts.scale)
    if experts.weighs_inputs:
        yield ("--moe-apply-probs-on-input",)
    yield ("--moe-grouped-gemm",)
    yield "--moe-token-dispatcher-type", "alltoall"


def _limits_groups(experts: Experts) -> bool:
    """Return whether Megatron-LM can choose experts within groups: it scores a group by the sum of
    its best ``per_token // chosen_groups`` experts."""
    return experts.num_groups > 1 and experts.per_token >= experts.chosen_groups


def pattern_text(layers: Sequence[bool]) -> str:
    """Write a pattern of layers as Megatron-LM reads it: a sum of repeated lists.

    >>> pattern_text([False, True, True, True]), pattern_text([True, False] * 2)
    ('([0]*1+[1]*3)', '([1,0]*2)')
    """
    bits = [int(each) for each in layers]
    pairs, rest = divmod(len(bits), 2)
    if not rest and pairs > 1 and bits == bits[:2] * pairs and bits[0] != bits[1]:
        return f"([{bits[0]},{bits[1]}]*{pairs})"
    return "(" + "+".join(f"[{bit}]*{len(list(run))}" for bit, run in groupby(bits)) + ")"


def _unlike(config: ModelConfig, seq: int | None) -> Iterator[Deviation]:
    """Yield properties of a model that its arguments do not express."""
    if config.kind == "gpt2":
        if not config.is_tied:
            yield Deviation(
                "output weights that are not tied to embeddings",
                "tied ones: give --untie-embeddings-and-output-weights",
            )
        return
    for text in unlike_llama(config, ("llama3", "yarn")):
        is_covered = config.kind == "gpt_oss" and text.startswith("biases")
        if not is_covered and not (text.startswith("attention within") and _is_short(config, seq)):
            yield Deviation(f"the model has {text}", f"{ARGUMENTS} has not")
    if not all(config.rotary_layers):
        yield Deviation(
            "queries scaled by their position in layers without rotary positions",
            "queries as they are",
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        usual = RopeScaling("llama3", scaling.factor)
        if scaling != usual:
            yield Deviation(
                f"rotary positions scaled by low and high factors of {scaling.low_freq_factor:g} "
                f"and {scaling.high_freq_factor:g} from {scaling.original_positions} positions",
                "by 1 and 4 from 8192",
            )
    yarn = config.yarn
    if config.latent is not None and yarn is not None and yarn.original_positions != 4096:
        yield Deviation(
            f"rotary positions scaled from {yarn.original_positions} positions", "from 4096"
        )
    if config.experts is not None:
        yield from _unlike_experts(config.experts)


def _is_short(config: ModelConfig, seq: int | None) -> bool:
    return seq is not None and config.chunk is not None and seq <= config.chunk


def _unlike_experts(experts: Experts) -> Iterator[Deviation]:
    if experts.score == "sigmoid" and not experts.normalizes and experts.per_token > 1:
        yield Deviation("weights of experts as scored", "divided by their sum")
    if experts.score == "softmax" and experts.normalizes and experts.per_token == 1:
        yield Deviation("a weight of 1 for the expert of a token", "its score")
    best = experts.per_token // experts.chosen_groups
    if experts.num_groups > 1 and not _limits_groups(experts):
        yield Deviation("experts chosen within groups", "chosen among all")
    elif experts.num_groups > 1 and best != 2:
        yield Deviation(
            "groups of experts scored by their two best", f"scored by their {best} best"
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
# Written by autoparallel export --to megatron, for Megatron-LM of August 2026.
set -euo pipefail
folder=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
mapfile -t arguments < "$folder/{ARGUMENTS}"
{connections}exec torchrun {nodes}--nproc-per-node {job.devices_per_host} \\
  "${{MEGATRON:?set it to the folder of Megatron-LM}}/pretrain_gpt.py" "${{arguments[@]}}" "$@"
"""


SYSTEM = System(
    "Megatron-LM",
    "main, August 2026",
    LIMITS,
    write,
    to_supported,
    builds_model=True,
    selects_less=True,
)
