"""``--check``: build the model without memory, make a batch, and describe both."""

from __future__ import annotations

from typing import Any

import torch

from autoparallel.options.words import bytes_text, count_text
from autoparallel.passes.programs.batch import leaves, path_text
from autoparallel.target.target import Target, building


def check_target(target: Target, global_batch: int, seq: int | None) -> str:
    """Describe ``target``, in a line for each function that its file may define.

    Raises UsageError (AP105 to AP108) if a function is wrong.
    """
    with building(target), torch.device("meta"):
        model = target.build_model()
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    held = [*parameters, *model.buffers()]
    allocated = sum(tensor.nbytes for tensor in held if not tensor.is_meta)
    batch = target.example_batch(global_batch, seq)
    parts = [f"{path_text(path)} {_leaf_text(leaf)}" for path, leaf in leaves(batch)]
    settings = ", ".join(f"{name}={value!r}" for name, value in target.settings.items())
    lines = [
        ("target", target.name),
        ("settings", settings or "none"),
        (
            "build_model",
            f"{type(model).__name__}, {count_text(count)} parameters in "
            f"{len(parameters)} tensors, {bytes_text(allocated)} allocated",
        ),
        ("example_batch", f"{type(batch).__name__} of {', '.join(parts)}"),
        ("loss", "loss_fn(outputs, batch)" if target.loss_fn else "from the model's own output"),
        ("build_optimizer", "found" if target.build_optimizer else "absent: AdamW"),
        ("build_data", "found" if target.build_data else "absent: random batches"),
    ]
    return "\n".join(f"{name:<16}{text}" for name, text in lines)


def _leaf_text(leaf: Any) -> str:

    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
