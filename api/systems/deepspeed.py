"""DeepSpeed: its configuration file in JSON.

The names are of release 0.19. Source: ``deepspeed/runtime/config.py`` of that release. DeepSpeed's
pipelines and sequence parallelism are written in the model's code, so they cannot be configured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import gcd
from typing import Any

from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.plan import Precision
from autoparallel.planner.schedules.catalogue import SCHEDULES
from autoparallel.systems.system import ONE_CHAIN, OVER_ALL, RECIPE, Files, System, WriterInput

CONFIG = "ds_config.json"

WITHOUT_PIPELINE = {
    **ONE_CHAIN,
    "pp": "data parallelism over the same devices; a pipeline is written in the model's code",
    **{
        name: "no schedule: it has no pipeline"
        for name, each in SCHEDULES.items()
        if each.family == "synchronous"
    },
    **{
        name: "one update a step, with the newest weights"
        for name, each in SCHEDULES.items()
        if each.family == "asynchronous"
    },
    "uneven-stages": "one stage",
    "mixed-stages": "one mesh of all devices",
    "branches": "one mesh of all devices",
    "mixed-zero": "one ZeRO stage",
}
"""Replacement of each plan feature that a training system without pipelines lacks."""

LIMITS = {
    **WITHOUT_PIPELINE,
    "hsdp": OVER_ALL,
    "sp": "norms on whole sequences",
    "cp": "data parallelism, or tensor parallelism where the batch has too few samples; its "
    "sequence parallelism is written in the model's code",
    "ring": "whole sequences on every rank",
    "halo": "whole sequences on every rank",
    "ulysses": "whole sequences on every rank",
    "selective": "recomputation of whole layers, which the model has to turn on",
    "full": "the model has to turn it on: model.gradient_checkpointing_enable()",
    "mixed-recompute": "recomputation of all layers",
    "weight-layouts": "whole weights, or its own column and row splits over tp",
    "device-order": "ranks in the order data, tensor",
    "lora": "what the model's code trains: adapt it with peft before deepspeed.initialize",
    "fp8": "bf16",
    "compile": "engine.compile() in your script",
}


def write(job: WriterInput) -> Files:
    """Return the files for DeepSpeed that train a configuration."""
    own = job.configuration
    text = json.dumps(config(own, job.plan.model.global_batch), indent=2) + "\n"
    hosts = f"--hostfile hosts --num_nodes {job.num_hosts} " if job.num_hosts > 1 else ""
    start = (
        f"deepspeed {hosts}--num_gpus {job.devices_per_host} train.py --deepspeed "
        f"--deepspeed_config {job.folder / CONFIG}"
    )
    notes = ["train.py is yours: deepspeed.initialize(config=args.deepspeed_config)", RECIPE]
    if own.recompute != "none":
        notes.insert(0, CHECKPOINTING)
    if own.tp > 1:
        notes.insert(0, "tensor parallelism is for Hugging Face models (AutoTP)")
    return Files({CONFIG: text}, start, notes=tuple(notes))


PRECISIONS: dict[Precision, Precision] = {"fp8": "bf16", "fp64": "fp32"}
"""Replacements for precisions that DeepSpeed does not support."""

CHECKPOINTING = (
    "the configuration does not turn recomputation on: call "
    "model.gradient_checkpointing_enable(), without which it needs more memory"
)


IN_HOST_MEMORY = {"device": "cpu", "pin_memory": True}
"""DeepSpeed's settings of states in host memory."""


def to_supported(own: Configuration) -> Configuration:
    """Return the configuration with options that DeepSpeed can run, keeping its degrees."""
    return replace(
        own,
        ep=gcd(own.ep, own.dp),  # its groups of experts are of data-parallel ranks alone
        etp=None,
        shard=None,  # MiCS, its sharding within groups, is for ZeRO 3 and models made for it
        zero=own.zero if own.offload == "none" else max(own.zero, 1),
        recompute="none" if own.recompute == "none" else "full",
        recompute_share=1.0,
        recomputes_ends=False,
        sequence_parallel=None,
        precision=PRECISIONS.get(own.precision, own.precision),
    )


def config(own: Configuration, global_batch: int) -> dict[str, Any]:
    """Return DeepSpeed's JSON configuration: batch sizes, precision, ZeRO, parallel degrees."""
    found: dict[str, Any] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": own.rank_rows,
        "gradient_accumulation_steps": own.num_microbatches,
        "optimizer": optimizer(own),
        "zero_optimization": {"stage": own.zero},
    }
    if own.optimizer.startswith("sgd") and own.zero:
        found["zero_allow_untested_optimizer"] = True  # DeepSpeed refuses SGD otherwise
    if own.offload != "none":  # with the optimizer's states DeepSpeed offloads gradients
        found["zero_optimization"]["offload_optimizer"] = dict(IN_HOST_MEMORY)
    if own.offload == "parameters" and own.zero == 3:
        found["zero_optimization"]["offload_param"] = dict(IN_HOST_MEMORY)
    if own.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if own.precision == "fp16":
        found["fp16"] = {"enabled": True, "loss_scale": 0}
    if own.precision in ("bf16", "fp16"):
        dtype = "fp32" if own.gradient_dtype == "master" else own.precision
        found |= {"communication_data_type": dtype, "data_types": {"grad_accum_dtype": dtype}}
    if own.tp > 1:
        found["tensor_parallel"] = {"autotp_size": own.tp}
    if own.ep > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": own.ep}
    return found


def optimizer(own: Configuration) -> dict[str, Any]:
    """Return the section ``optimizer``: the type, and parameters such as the momentum of SGD."""
    if own.optimizer.startswith("sgd"):
        momentum = 0.9 if own.optimizer == "sgd-momentum" else 0.0
        return {"type": "SGD", "params": {"momentum": momentum}}
    if own.optimizer == "adam":  # DeepSpeed makes it AdamW by default
        return {"type": "Adam", "params": {"adam_w_mode": False}}
    return {"type": "AdamW", "params": {}}


SYSTEM = System("DeepSpeed", "0.19", LIMITS, write, to_supported, lacks=("cp", "pp"))
