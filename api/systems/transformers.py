"""The Trainer of Hugging Face transformers: keywords of ``TrainingArguments`` as JSON.

``HfArgumentParser.parse_json_file`` reads the file. The names are of release 5.23. Source:
``transformers/training_args.py`` of that release. Tensor and context parallelism are Accelerate's:
they come with its YAML file, with which the script is then started.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from autoparallel.exporting.plans import torchrun
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.systems import accelerate, deepspeed
from autoparallel.systems.system import RECIPE, Files, System, WriterInput

ARGUMENTS = "training_arguments.json"

LIMITS = {
    **{
        name: text
        for name, text in accelerate.LIMITS.items()
        if name not in ("sgd", "sgd-momentum")
    },
    "adam": "AdamW, the same without weight decay",
    "compute-gradients": "gradients reduced in float32, but by DeepSpeed as its section says",
    "fp8": "bf16",
}


def write(job: WriterInput) -> Files:
    """Return the files of a job."""
    own = job.configuration
    uses_launcher = accelerate.backend_of(own) == "fsdp" and own.tp * own.cp > 1
    texts = {ARGUMENTS: json.dumps(arguments(job), indent=2) + "\n"}
    if uses_launcher:
        texts[accelerate.CONFIG] = accelerate.yaml_text(accelerate.launch_config(job))
        launcher = accelerate.launcher(job)
    else:
        launcher = torchrun(job.plan.cluster)
    notes = [
        "in train.py: HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])",
        *(note for note in accelerate.backend_notes(own) if note != deepspeed.CHECKPOINTING),
        RECIPE,
    ]
    return Files(
        texts,
        f"{launcher} train.py {job.folder / ARGUMENTS}",
        tuple(accelerate.backend_lost(own)),
        tuple(notes),
    )


def to_supported(own: Configuration) -> Configuration:
    """Change a configuration to options that the Trainer can run, and keep its degrees."""
    if own.precision == "fp8":
        own = replace(own, precision="bf16")
    return accelerate.to_supported(own)


def arguments(job: WriterInput) -> dict[str, Any]:
    """Return the keywords of ``TrainingArguments``."""
    own, backend = job.configuration, accelerate.backend_of(job.configuration)
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
        found["deepspeed"] = deepspeed.config(own, job.plan.model.global_batch)
        del found["deepspeed"]["optimizer"]  # the Trainer makes it, with its learning rate
    if backend == "fsdp":
        settings = accelerate.fsdp(own)
        settings["cpu_offload"] = settings.pop("offload_params")
        found |= {"fsdp": True, "fsdp_config": settings}
        if accelerate.accumulates_sharded(own):
            found["accelerator_config"] = {
                "gradient_accumulation_kwargs": {"sync_each_batch": True}
            }
    elif own.recompute != "none":
        found["gradient_checkpointing"] = True
    return found


SYSTEM = System("transformers Trainer", "5.23", LIMITS, write, to_supported, lacks=("ep", "pp"))
