"""Files beside the weights in a Hugging Face folder: configuration, tokenizer, adapters.

In: an ``hf:`` target and a folder to write to. Out: files that ``from_pretrained`` of transformers,
or ``PeftModel.from_pretrained`` of peft, can read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from autoparallel.target.huggingface import model_place, target_config
from autoparallel.target.lora import Lora
from autoparallel.target.target import Target

if TYPE_CHECKING:
    from torch import Tensor

COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Patterns of files in the Hugging Face folder that are copied, as weights do not change them."""

PEFT_PREFIX = "base_model.model."


def write_model_files(folder: Path, target: Target, dtype: str) -> None:
    """Write the configuration of an ``hf:`` target's model, with ``dtype`` as the dtype of its
    weights, and copy its tokenizer's files."""
    config = target_config(target)
    config.dtype = dtype
    config.save_pretrained(folder)
    place = Path(model_place(target.name))
    for pattern in COPIED if place.is_dir() else ():
        for file in place.glob(pattern):
            if file.is_file():
                shutil.copy2(file, folder / file.name)


def write_adapters(
    folder: Path,
    target: Target | None,
    lora: Lora | None,
    paths: Sequence[str],
    tensors: Mapping[str, Tensor],
) -> list[Path]:
    """Write LoRA adapters as peft does: ``adapter_config.json`` and ``adapter_model.safetensors``.
    ``paths`` are the adapted layers, ``tensors`` the adapters; returns the tensor files."""
    assert target is not None
    assert lora is not None
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_place(target.name),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": target_config(target).model_type == "gpt2",
        "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    file = folder / "adapter_model.safetensors"
    save_file(
        {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()},
        file,
        metadata={"format": "pt"},
    )
    return [file]
