"""Hugging Face Accelerate, and the Trainer of transformers, which is based on it.

For Accelerate a YAML file for ``accelerate launch --config_file`` is written, with the names of
release 1.15. Source: ``accelerate/commands/config/config_args.py`` and
``accelerate/parallelism_config.py`` of that release. ZeRO 3 is run by FSDP 2; ZeRO 1 and 2, and
offloaded optimizer states, by DeepSpeed; tensor and context parallelism need FSDP 2.

For the Trainer the keyword arguments of ``TrainingArguments`` are written as JSON for
``HfArgumentParser.parse_json_file``, with the names of release 5.23. Source:
``transformers/training_args.py`` of that release. Tensor and context parallelism are set in
Accelerate's file, and the script is then started with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from autoparallel.exporting.plans import torchrun
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.systems.deepspeed import CHECKPOINTING, WITHOUT_PIPELINE
from autoparallel.systems.deepspeed import config as deepspeed_config
from autoparallel.systems.features import FEATURES
from autoparallel.systems.system import RECIPE, Deviation, Files, System, WriterInput, whole_shard

CONFIG = "accelerate.yaml"

Backend = Literal["none", "ddp", "deepspeed", "fsdp", "tp"]
"""Accelerate's backend: one process, DDP, DeepSpeed, FSDP 2, or only tensor parallelism."""

LIMITS = {
    **WITHOUT_PIPELINE,
    "sp": "norms on whole sequences",
    "ep": "data parallelism: every rank gathers all experts",
    "ring": "keys and values gathered",
    "halo": "keys and values gathered",
    "ulysses": "keys and values gathered",
    "selective": "recomputation of whole layers",
    "mixed-recompute": "recomputation of all layers",
    "weight-layouts": "whole weights, or split as the model's class says (tp_plan)",
    "device-order": "ranks in the order data, context, tensor",
    "compute-gradients": "gradients reduced in float32 by FSDP; by DeepSpeed as its own "
    "configuration says",
    "lora": "what the model's code trains: adapt it with peft",
    "adam": "the optimizer of your script",
    "sgd": "the optimizer of your script",
    "sgd-momentum": "the optimizer of your script",
}


def write(job: WriterInput) -> Files:
    """Return the files for Accelerate that train a configuration."""
    own = job.configuration
    found = launch_config(job)
    comment = "# Written by autoparallel export --to accelerate, for accelerate 1.15.\n"
    notes = [
        f"in your script: DataLoader(batch_size={own.rank_rows}) and {accumulation(own)}: "
        f"{own.rank_rows} × {own.num_microbatches} × {own.dp} data-parallel ranks = "
        f"{job.plan.model.global_batch} samples a step",
        *backend_notes(own),
        RECIPE,
    ]
    start = f"{launcher(job)} train.py"
    return Files(
        {CONFIG: comment + yaml_text(found)}, start, tuple(backend_lost(own)), tuple(notes)
    )


def launcher(job: WriterInput) -> str:
    """Return the ``accelerate launch`` command; each host runs it."""
    hosts = " --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    several = hosts if job.num_hosts > 1 else ""
    return f"accelerate launch --config_file {job.folder / CONFIG}{several}"


def accumulation(own: Configuration) -> str:
    """Return a script's code for gradient accumulation; FSDP's gradients stay sharded, as priced.

    >>> accumulation(Configuration(dp=8, zero=1, num_microbatches=4))
    'Accelerator(gradient_accumulation_steps=4)'
    """
    count = own.num_microbatches
    if not accumulates_sharded(own):
        return f"Accelerator(gradient_accumulation_steps={count})"
    return (
        f"plugin = GradientAccumulationPlugin(num_steps={count}, sync_each_batch=True), "
        "Accelerator(gradient_accumulation_plugin=plugin)"
    )


def accumulates_sharded(own: Configuration) -> bool:
    """Return whether gradients must be reduced after each micro-batch in order to stay sharded."""
    return backend_of(own) == "fsdp" and own.num_microbatches > 1


def backend_of(own: Configuration) -> Backend:
    """Return Accelerate's backend (DDP, FSDP, DeepSpeed, …) that trains a configuration.

    >>> backend_of(Configuration(dp=8, zero=3)), backend_of(Configuration(dp=8, zero=1))
    ('fsdp', 'deepspeed')
    """
    if own.num_devices == 1:
        return "none"
    if own.dp * own.cp == 1:
        return "tp"
    if own.tp * own.cp == 1 and own.zero < 3 and (own.zero or own.offload != "none"):
        return "deepspeed"
    if own.tp * own.cp == 1 and own.offload in ("optimizer", "gradients"):
        return "deepspeed"
    return "ddp" if own.tp * own.cp == 1 and own.zero == 0 else "fsdp"


def to_supported(own: Configuration) -> Configuration:
    """Return the configuration with options that Accelerate can run, keeping its degrees."""
    own = replace(
        own,
        recompute="none" if own.recompute == "none" else "full",
        recompute_share=1.0,
        recomputes_ends=False,
        sequence_parallel=None,
        precision="fp32" if own.precision == "fp64" else own.precision,
    )
    match backend_of(own):
        case "fsdp":
            own = replace(own, shard=whole_shard(own))
            return replace(own, zero=max(own.zero, 2), gradient_dtype="master")
        case "deepspeed":
            return replace(own, zero=max(own.zero, 1), shard=None)
        case _:
            return replace(own, zero=0, offload="none")


def backend_lost(own: Configuration) -> list[Deviation]:
    """Return differences from the plan due to the backend, such as FSDP instead of ZeRO 2."""
    if backend_of(own) != "fsdp":
        return []
    lost = []
    if own.zero == 2:
        lost.append(
            Deviation(
                "ZeRO 0, 1 or 2 beside tensor or context parallelism",
                "FSDP 2 that keeps parameters gathered between forward and backward "
                "(reshard_after_forward false): it shards gradients and parameters too",
            )
        )
    if own.shard_degree and own.num_microbatches > 1:
        lost.append(
            Deviation(
                "shards of gradients summed over groups once a step",
                "summed over groups after every micro-batch",
            )
        )
    if own.offload in ("optimizer", "gradients"):
        name = "offload" if own.offload == "optimizer" else "offload-gradients"
        lost.append(
            Deviation(FEATURES[name], "FSDP's offload, which moves parameters and gradients too")
        )
    return lost


def backend_notes(own: Configuration) -> list[str]:
    """Return notes for the user about code that the training script needs for the backend."""
    backend = backend_of(own)
    notes = []
    if own.tp > 1:
        size = f"tp_size={own.tp}"
        notes.append(
            f'load the model with tp_plan="auto" and a device mesh of {size}'
            + ("; every process is in the one tensor-parallel group" if backend == "tp" else "")
        )
    if own.cp > 1:
        notes.append("run each step within accelerator.maybe_context_parallel(...)")
    if own.recompute != "none" and backend != "fsdp":
        notes.append(CHECKPOINTING)
    if backend == "fsdp":
        notes.append(
            "FSDP wraps the layers that a Hugging Face model names; for other models add "
            "fsdp_transformer_layer_cls_to_wrap"
        )
    return notes


def launch_config(job: WriterInput) -> dict[str, Any]:
    """Return the entries of the configuration file for ``accelerate launch``."""
    own, backend = job.configuration, backend_of(job.configuration)
    kinds = {"none": "NO", "deepspeed": "DEEPSPEED", "fsdp": "FSDP"}
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kinds.get(backend, "MULTI_GPU"),
        "mixed_precision": own.precision if own.precision in ("bf16", "fp16", "fp8") else "no",
        "num_processes": own.num_devices,
        "num_machines": job.num_hosts,
        "machine_rank": 0,
        "use_cpu": False,
        "main_training_function": "main",
    }
    if own.precision == "fp8":
        found["fp8_config"] = {"backend": "AO"}
    if own.compiled:
        found["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": True,
        }
    if backend == "deepspeed":
        found["deepspeed_config"] = {
            "zero_stage": own.zero,
            "gradient_accumulation_steps": own.num_microbatches,
            "offload_optimizer_device": "none" if own.offload == "none" else "cpu",
            "offload_param_device": "none",
        }
    if backend == "fsdp":
        found["fsdp_config"] = {f"fsdp_{name}": value for name, value in fsdp(own).items()}
        if own.tp * own.cp > 1 or own.shard_degree:
            found["parallelism_config"] = {
                f"parallelism_config_{name}": value for name, value in parallelism(own).items()
            }
    return found


def fsdp(own: Configuration) -> dict[str, Any]:
    """Return FSDP's settings by name; in Accelerate's file names have the prefix ``fsdp_``."""
    return {
        "version": 2,
        "reshard_after_forward": own.zero == 3,
        "offload_params": own.offload != "none",
        "activation_checkpointing": own.recompute != "none",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    }


def parallelism(own: Configuration) -> dict[str, int]:
    """Return the keyword arguments of Accelerate's ``ParallelismConfig``: parallel degrees."""
    shards = (own.shard_degree or own.dp * own.cp) // own.cp
    return {
        "dp_replicate_size": own.dp // shards,
        "dp_shard_size": shards,
        "cp_size": own.cp,
        "tp_size": own.tp,
    }


def yaml_text(values: Mapping[str, Any]) -> str:
    """Write a mapping of values, and of mappings of values, as YAML; values are written as JSON.

    >>> yaml_text({"a": 1, "b": {"c": "x", "d": True}})
    'a: 1\\nb:\\n  c: "x"\\n  d: true\\n'
    """
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{name}:", *(f"  {key}: {json.dumps(each)}" for key, each in value.items())]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


SYSTEM = System("Accelerate", "1.15", LIMITS, write, to_supported, lacks=("ep", "pp"))

ARGUMENTS = "training_arguments.json"

TRAINER_LIMITS = {
    **{name: text for name, text in LIMITS.items() if name not in ("sgd", "sgd-momentum")},
    "adam": "AdamW, the same without weight decay",
    "compute-gradients": "gradients reduced in float32, but by DeepSpeed as its section says",
    "fp8": "bf16",
}


def write_arguments(job: WriterInput) -> Files:
    """Return the files for transformers' Trainer that train a configuration."""
    own = job.configuration
    texts = {ARGUMENTS: json.dumps(arguments(job), indent=2) + "\n"}
    start = torchrun(job.plan.cluster)
    if backend_of(own) == "fsdp" and (own.tp * own.cp > 1 or own.shard_degree):
        texts[CONFIG] = yaml_text(launch_config(job))
        start = launcher(job)
    notes = [
        "in train.py: HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])",
        *(note for note in backend_notes(own) if note != CHECKPOINTING),
        RECIPE,
    ]
    return Files(
        texts,
        f"{start} train.py {job.folder / ARGUMENTS}",
        tuple(backend_lost(own)),
        tuple(notes),
    )


def to_trainer(own: Configuration) -> Configuration:
    """Return the configuration with options that the Trainer can run, keeping its degrees."""
    if own.precision == "fp8":
        own = replace(own, precision="bf16")
    return to_supported(own)


def arguments(job: WriterInput) -> dict[str, Any]:
    """Return the keyword arguments of ``TrainingArguments``."""
    own, backend = job.configuration, backend_of(job.configuration)
    found: dict[str, Any] = {
        "output_dir": "run",
        "per_device_train_batch_size": own.rank_rows,
        "gradient_accumulation_steps": own.num_microbatches,
        "bf16": own.precision == "bf16",
        "fp16": own.precision == "fp16",
        "optim": "sgd" if own.optimizer.startswith("sgd") else "adamw_torch",
        "torch_compile": own.compiled,
    }
    if own.optimizer == "sgd-momentum":
        found["optim_args"] = "momentum=0.9"
    if backend == "deepspeed":
        found["deepspeed"] = deepspeed_config(own, job.plan.model.global_batch)
        del found["deepspeed"]["optimizer"]  # the Trainer makes it, with its learning rate
    if backend == "fsdp":
        settings = fsdp(own)
        settings["cpu_offload"] = settings.pop("offload_params")
        found |= {"fsdp": True, "fsdp_config": settings}
        if accumulates_sharded(own):
            found["accelerator_config"] = {
                "gradient_accumulation_kwargs": {"sync_each_batch": True}
            }
    elif own.recompute != "none":
        found["gradient_checkpointing"] = True
    return found


TRAINER = System(
    "transformers Trainer", "5.23", TRAINER_LIMITS, write_arguments, to_trainer, lacks=("ep", "pp")
)
