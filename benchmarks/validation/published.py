"""``published_runs.csv``: what its cells say, as configurations.

In: a row. Out: a ``Run``. Texts that say nothing that can be priced raise with the reason:
accelerators without a preset, sharding found by another planner, offloading, schedules
that are not built, missing cells.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import inf

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.memory import PrecisionPolicy
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.costs.basis import SystemName, assumptions_of
from autoparallel.planner.costs.precision import EIGHT_BITS
from autoparallel.planner.plan import Precision, Recompute
from autoparallel.planner.schedules.schedules import SCHEDULES

from .clusters import make_cluster
from .models import Family, Kernels, Shape
from .sources import (
    ACCUMULATING,
    BF16_OPTIMIZER,
    CACHED,
    CACHED_COMPILED,
    EXPOSED_BESIDE_PRODUCTS,
    FOUNDRY,
    FOUNDRY_A100,
    FOUNDRY_H100,
    HOOKED_SECONDS,
    INTERNEVO,
    Program,
)
from .tables import (
    GIB,
    Row,
    Run,
    UnusableRowError,
    check_degrees,
    half_policy,
    has_eight_bits,
    measured,
    microbatches,
    number,
    padded,
    scaling,
)

TITAN_PRODUCTS_KEPT = 0.5
"""torchtitan's selective checkpointing keeps attention and every second matrix product
(parallelisms/parallelize_llama.py)."""
KEPT_IN_PIPELINES = 1
"""ZeRO stage of torchtitan's FSDP in a pipeline: parameters stay whole after a forward, and whole
gradients are added up until the last micro-batch (``set_requires_gradient_sync`` in PyTorch's
``PipelineStage``)."""
LEAST_CHUNKS = 2
"""Chunks of a rank where an interleaved schedule does not say how many."""
RESERVED = ("nvidia-smi", "reserved", "llama3_h100_202412")
"""Words of a row whose memory is what the allocator reserved."""
STEP_METRICS = ("iter_time_s", "tokens/s", "TFLOPs/GPU", "samples/s")


def published(row: Row, line: int) -> Run:
    """The run of a row."""
    metric = row.get("measured_metric", "")
    if not metric.startswith(STEP_METRICS):
        raise UnusableRowError(f"{metric or 'no figure'} is not the time of a step")
    assumed: list[str] = []
    cluster, missing = _cluster(
        row.get("gpu_type", ""),
        number(row, "n_gpus"),
        number(row, "gpus_per_node", default=8),
        row.get("interconnect", ""),
        row.get("source", ""),
    )
    assumed += missing
    configuration = _configuration(row, assumed)
    system: SystemName = "torchtitan" if _is_titan(row) else "megatron"
    assumptions = replace(
        assumptions_of(system, "fp8" if has_eight_bits(row) else "bf16"),
        policy=_policy(row),
        recomputed=("core_attn",) if _selective_share(row) == 1.0 else (),
        copies_states=not any(name in row.get("source", "") for name in ("alpa", "maxtext")),
        scaling=scaling(row),
        attention="cudnn" if "cuDNN" in row.get("attention_impl", "") else "flash",
        regathers=bool(configuration.sequence_parallel) and not _is_titan(row),
        slowdown=None if _overlaps(row, configuration.zero) else inf,
    )
    shape = _shape(row, configuration.tp, assumed)
    schedule, chunks = _schedule(row, configuration, shape.layers, assumed)
    configuration = replace(
        configuration,
        schedule=schedule,
        num_chunks=chunks,
        layers=_uneven(row, configuration.pp * chunks, shape.layers),
        precision=_precision(row, cluster),
    )
    check_degrees(shape, configuration, cluster.num_devices)
    is_oom = "OOM" in row.get("measured_value", "")
    memory = row.get("peak_memory_gib", "")
    return Run(
        row.get("row_id") or f"line {line}",
        row.get("source", ""),
        shape,
        cluster,
        configuration,
        None if is_oom else measured(row.get("derived_iter_time_s", ""), "derived_iter_time_s"),
        measured(memory, "peak_memory_gib") * GIB if memory and not is_oom else None,
        is_oom,
        row.get("quality") or "A",
        assumed=tuple(assumed),
        program=replace(
            _program(row, configuration.num_microbatches),
            exposed_share=_exposed_share(row),
            kept_outputs=_kept_outputs(row, configuration, shape.layers),
            cached=_cached(row, configuration),
            layer_host_seconds=HOOKED_SECONDS if _runs_hooks(row) else 0.0,
        ),
        assumptions=assumptions,
    )


@cache
def _cluster(
    gpu: str, num_devices: int, per_host: int, interconnect: str, source: str
) -> tuple[Cluster, tuple[str, ...]]:
    cluster, missing = make_cluster(gpu, num_devices, per_host, interconnect)
    if "llm-foundry" in source:
        cluster = (FOUNDRY_H100 if gpu.startswith("H") else FOUNDRY_A100).seen(cluster)
    return cluster, missing


def _precision(row: Row, cluster: Cluster) -> Precision:
    """The planner's precision: bfloat16 is as fast as float16 where devices have it."""
    if has_eight_bits(row):
        if any(EIGHT_BITS not in host.device.peak_flops for host in cluster.hosts):
            raise UnusableRowError(f"{row['gpu_type']} does not compute in 8 bits")
        return "fp8"
    has_bfloat16 = all("bfloat16" in host.device.peak_flops for host in cluster.hosts)
    return "bf16" if has_bfloat16 else "fp16"


def _shape(row: Row, tp: int, assumed: list[str]) -> Shape:
    hidden, heads = number(row, "hidden"), number(row, "heads")
    ffn = number(row, "ffn", default=4 * hidden)
    kv_heads = number(row, "kv_heads", default=heads)
    if "not stated" in row.get("vocab", ""):
        assumed.append("vocab")
        vocab = 51200
    else:
        vocab = number(row, "vocab")
    family = _family(row.get("model", ""), hidden, ffn)
    attention = _attention(row, family, assumed)
    dropped = family == "gpt" and attention == "unfused" and "ALiBi" not in row["attention_impl"]
    if kv_heads < tp and tp % kv_heads == 0:
        kv_heads = tp
    return Shape(
        family,
        hidden,
        heads,
        kv_heads,
        ffn,
        number(row, "layers"),
        number(row, "seq_len"),
        padded(vocab, tp),
        attention,
        0.1 if dropped else 0.0,
        _fuses(row),
        family == "gpt",
        _is_titan(row),
        "llm-foundry" in row["source"],
        _fuses_loss(row),
    )


COMPILED_LOSS = ("2025-06", "2026-01", "mi300x", "b200")
"""Words of torchtitan's runs that are later than February 2025, when it began to compile the
loss."""


def _fuses_loss(row: Row) -> bool:
    """Tells whether one kernel computes the loss.

    MLPerf's recipes use that of TransformerEngine, llm-foundry that of FlashAttention, and
    torchtitan's later runs one that the compiler generates.
    """
    text = row["source"] + row.get("row_id", "")
    if "llm-foundry" in text or "mlcommons" in text:
        return True
    is_late = any(word in text for word in COMPILED_LOSS)
    return _is_titan(row) and is_late and "compile" in row["precision"]


def _runs_hooks(row: Row) -> bool:
    """Tells whether DeepSpeed's ZeRO 3 gathers parameters in hooks of every module."""
    text = row.get("zero_stage/fsdp", "")
    return "ZeRO-3" in text and "DeepSpeed" in text


def _fuses(row: Row) -> bool:
    """Whether rotary positions and the activation are single kernels."""
    return "TransformerEngine" in row["attention_impl"]


def _is_titan(row: Row) -> bool:
    return "torchtitan" in row.get("source", "")


def _family(model: str, hidden: int, ffn: int) -> Family:
    name = model.lower()
    if "llama" in name:
        return "llama"
    if "nemotron" in name:
        return "nemotron"
    if "amoeba" in name or "resnet" in name or "moe" in name:
        raise UnusableRowError(f"{model} is not a dense decoder")
    return "gpt" if ffn == 4 * hidden else "llama"


def _attention(row: Row, family: Family, assumed: list[str]) -> Kernels:
    """As stated; else as Megatron-LM has GPTs by default, unfused, and others use flash."""
    text = row.get("attention_impl", "").lower()
    if "unfused" in text:
        return "unfused"
    if "flash" in text or "fused" in text:
        return "flash"
    assumed.append("attention")
    return "unfused" if family == "gpt" else "flash"


def _configuration(row: Row, assumed: list[str]) -> Configuration:
    """Degrees, batch, precision, ZeRO and recomputation; the schedule comes after."""
    dp, tp, pp, cp = (number(row, name) for name in ("dp", "tp", "pp", "cp"))
    num_rows = number(row, "global_batch_seqs")
    rows = _micro_batch(row, num_rows // dp, pp, assumed)
    zero = _zero(row)
    num_microbatches = microbatches(num_rows, dp, rows)
    return Configuration(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero=zero,
        shard=_shard(row),
        recompute=_recompute(row, assumed),
        microbatch_size=rows * dp,
        num_microbatches=num_microbatches,
        sequence_parallel=_sequence_parallel(row, tp),
        precision="bf16",
        recomputes_ends=False,
        selective_share=_selective_share(row),
        recompute_share=_recompute_share(row),
        compiled="torch.compile" in row["precision"],
        compiles_ends="torchtitan@b5bcd76" not in row["source"],  # whose loss was not compiled
    )


def _micro_batch(row: Row, num_rows: int, pp: int, assumed: list[str]) -> int:
    """As stated; else a pipeline of torchtitan has as many micro-batches as stages
    (``pipeline_parallel_microbatches`` of 2024). ``num_rows``: of a data-parallel rank."""
    if row.get("micro_batch") or not _is_titan(row) or pp == 1:
        return number(row, "micro_batch")
    assumed.append("micro_batch")
    return max(1, num_rows // pp)


def _selective_share(row: Row) -> float:
    """The share of layers' products that recomputation by op keeps."""
    if "save_qkv_proj" in row["recompute"]:
        hidden, kv = number(row, "hidden"), number(row, "kv_heads") / number(row, "heads")
        projections = 1 + 2 * kv
        return projections / (projections + 1 + 3 * number(row, "ffn") / hidden)
    return TITAN_PRODUCTS_KEPT if "per-op SAC" in row["recompute"] else 1.0


def _recompute_share(row: Row) -> float:
    """The share of blocks that are recomputed, from hardware and model FLOPs (HFU/MFU .69/.61):
    a recomputed forward is a third of what a model's forward and backward take."""
    found = re.search(r"HFU/MFU A100 (\.\d+)/(\.\d+)", row["recompute"])
    return min(1.0, 3 * (float(found[1]) / float(found[2]) - 1)) if found else 1.0


HALF_GRADIENTS = re.compile(r"gradients in bf16|(kept and reduced|reduced) in bf16")
"""Words of a row whose program keeps and reduces bf16 gradients."""

RECIPES = re.compile(r"NVIDIA/(dgxc-benchmarking|NeMo)(?!.*maxtext)|mlcommons")
"""Sources whose runs follow NVIDIA's recipes for speed: gradients in bf16 (``grad_reduce_in_fp32``
off), and parameters gathered in 8 bits where products are."""


def _policy(row: Row) -> PrecisionPolicy:
    """Adam in mixed precision; parameters that are gathered in 8 bits are also held so."""
    is_recipe = bool(RECIPES.search(row.get("source", "")))
    eight = "gathered in fp8" in row.get("notes", "") or (is_recipe and has_eight_bits(row))
    return half_policy(2 if is_recipe else _gradient_bytes(row), 1 if eight else 2)


def _gradient_bytes(row: Row) -> int:
    """Bytes of a gradient that is kept and reduced: float32 in Megatron-LM's and FSDP's bf16,
    unless the row says otherwise."""
    text = row.get("precision", "").lower()
    if not text or text.startswith(("not stated", "fp32")):
        raise UnusableRowError(f"precision {text!r} is not mixed half precision")
    if HALF_GRADIENTS.search(f"{text} {row.get('notes', '')}"):
        return 2
    is_half = "bf16" in text and "fp16/bf16" not in text
    return 4 if is_half or has_eight_bits(row) else 2


def _zero(row: Row) -> int:
    text = row.get("zero_stage/fsdp", "")
    if any(word in text for word in ("auto", "ILP", "offload")):
        raise UnusableRowError(f"sharding {text!r}")
    stage = re.search(r"ZeRO-(\d)", text)
    if text.startswith("not stated") or not text or text == "n/a":
        raise UnusableRowError(f"sharding {text or 'is missing'!r}")
    if stage:
        return KEPT_IN_PIPELINES if _is_titan(row) and number(row, "pp") > 1 else int(stage[1])
    if "FULL_SHARD" in text or text.startswith("HSDP"):
        return 3
    if "distributed optimizer" in text:
        return 1
    if text.startswith("0"):
        return 0
    raise UnusableRowError(f"sharding {text!r}")


def _shard(row: Row) -> int | None:
    """Return the ranks over which states are sharded where these are a part of all."""
    text = row.get("zero_stage/fsdp", "")
    found = re.search(r"shard=(\d+) x replicate|shard in node of (\d+)", text)
    return int(found[1] or found[2]) if found else None


def _overlaps(row: Row, zero: int) -> bool:
    """Whether gradients and parameters travel while others compute: FSDP, or where stated.

    XLA ran collectives in the stream of compute when Alpa was measured.
    """
    text = row.get("zero_stage/fsdp", "")
    return (zero >= 2 and "alpa" not in row.get("source", "")) or "overlap" in text


def _program(row: Row, num_microbatches: int) -> Program:
    """How gradients are accumulated, where they are: DeepSpeed's, and Megatron-LM's of 2021."""
    if "llm-foundry" in row["source"]:
        return FOUNDRY
    if "hybrid zero optimizer" in row["zero_stage/fsdp"]:
        return INTERNEVO
    if num_microbatches == 1:
        return Program()
    if "BF16_Optimizer" in row["zero_stage/fsdp"]:
        return BF16_OPTIMIZER
    is_unfused = "DeepSpeed" in row["zero_stage/fsdp"] or "SC21" in row["source"]
    return ACCUMULATING if is_unfused else Program()


def _exposed_share(row: Row) -> float:
    """Of tensor-parallel collectives what is not hidden by TransformerEngine or AsyncTP."""
    is_hidden = "TP-comm overlap" in row["notes"] or "AsyncTP" in row["precision"]
    return EXPOSED_BESIDE_PRODUCTS if is_hidden else 1.0


def _kept_outputs(row: Row, own: Configuration, num_layers: int) -> float:
    """DeepSpeed's pipeline holds a stage's outputs with their graph until its backward
    (deepspeed/runtime/pipe/engine.py, pipe_buffers): one tensor more than its checkpoints."""
    holds = "DeepSpeed" in row["zero_stage/fsdp"] and own.pp > 1 and own.recompute == "full"
    return own.num_stages / num_layers if holds else 0.0


def _cached(row: Row, own: Configuration) -> float:
    """The share of what comes and goes that counts besides, where the memory is what the allocator
    reserved, and not what tensors took."""
    if not any(word in row["notes"] + row["source"] for word in RESERVED):
        return 0.0
    return CACHED_COMPILED if own.compiled else CACHED


def _recompute(row: Row, assumed: list[str]) -> Recompute:
    text = row.get("recompute", "")
    if text.startswith("full"):
        return "full"
    if text.startswith("none"):
        return "none"
    if "default none" in text:
        assumed.append("recompute")
        return "none"
    if "per-op SAC" in text and _is_titan(row):
        return "selective"
    if text.startswith("partial (save_qkv_proj)"):
        return "selective"
    if text.startswith("selective (attention core)") or text == "selective + sequence parallel":
        return "selective"
    if text == "selective" and "TransformerEngine" in row["attention_impl"]:
        return "selective"
    if "HFU/MFU" in text:
        return "full"
    raise UnusableRowError(f"recomputation {text or 'is missing'!r}")


def _sequence_parallel(row: Row, tp: int) -> bool | None:
    """As stated; else on with TransformerEngine or DTensor, as their recipes have it, else off."""
    if tp == 1:
        return None
    text = " ".join(row.get(name, "") for name in ("recompute", "notes", "attention_impl"))
    if re.search(r"no sequence parallel|no SP\b", text):
        return False
    if "sequence parallel" in row.get("recompute", ""):
        return True
    return "TransformerEngine" in text or "SDPA" in text


def _schedule(row: Row, own: Configuration, layers: int, assumed: list[str]) -> tuple[str, int]:
    """The schedule's name and the chunks of a rank."""
    text = row.get("schedule", "")
    if own.pp == 1:
        return "1f1b", 1
    chunks = re.search(r"\b[vm]=(\d+)", text)
    if "interleaved" in text and "1 layer per chunk" in text:
        return "interleaved-1f1b", -(-layers // own.pp)
    if "interleaved" in text and chunks:
        return "interleaved-1f1b", int(chunks[1])
    if text.startswith("interleaved 1F1B") and _is_titan(row):
        assumed.append("virtual stages")
        return "interleaved-1f1b", LEAST_CHUNKS
    if text.startswith("1F1B"):
        if "not stated" in text:
            assumed.append("schedule")
        return "1f1b", 1
    if text.startswith("GPipe"):
        return "gpipe", 1
    name = text.split(" ")[0].lower().rstrip(",;")
    if name in SCHEDULES:
        return name, 1
    raise UnusableRowError(f"schedule {text or 'is missing'!r}")


def _uneven(row: Row, stages: int, layers: int) -> tuple[int, ...] | None:
    """Chunks of one layer, of which the ends have none: they have the embedding and the head."""
    if "1 layer per chunk" not in row.get("schedule", "") or stages - layers != 2:
        return None
    return (0, *(1,) * layers, 0)
