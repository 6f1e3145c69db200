"""``--check``: build the model without memory, make a batch, and describe both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoparallel.options.words import bytes_text, count_text
from autoparallel.passes.programs.batch import leaves, path_text
from autoparallel.target.target import Target, building


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A model file and its batch, as ``--check`` finds them; settings as Python writes them."""

    target: str
    settings: Mapping[str, str]
    model: str
    num_parameters: int
    num_tensors: int
    allocated_bytes: int
    batch: str
    batch_leaves: Mapping[str, str]
    loss_fn: bool
    build_optimizer: bool
    build_data: bool

    def __str__(self) -> str:
        parts = [f"{path} {leaf}" for path, leaf in self.batch_leaves.items()]
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        lines = [
            ("target", self.target),
            ("settings", settings or "none"),
            (
                "build_model",
                f"{self.model}, {count_text(self.num_parameters)} parameters in "
                f"{self.num_tensors} tensors, {bytes_text(self.allocated_bytes)} allocated",
            ),
            ("example_batch", f"{self.batch} of {', '.join(parts)}"),
            ("loss", "loss_fn(outputs, batch)" if self.loss_fn else "from the model's own output"),
            ("build_optimizer", "found" if self.build_optimizer else "absent: AdamW"),
            ("build_data", "found" if self.build_data else "absent: random batches"),
        ]
        return "\n".join(f"{name:<16}{text}" for name, text in lines)


def check_target(target: Target, global_batch: int, seq: int | None) -> CheckedTarget:
    """Describe ``target``: each function that its file may define.

    Raises UsageError (AP105 to AP108) if a function is wrong.
    """
    with building(target), torch.device("meta"):
        model = target.build_model()
    parameters = list(model.parameters())
    held = [*parameters, *model.buffers()]
    batch = target.example_batch(global_batch, seq)
    return CheckedTarget(
        target=target.name,
        settings={name: repr(value) for name, value in target.settings.items()},
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        allocated_bytes=sum(tensor.nbytes for tensor in held if not tensor.is_meta),
        batch=type(batch).__name__,
        batch_leaves={path_text(path): _leaf_text(leaf) for path, leaf in leaves(batch)},
        loss_fn=target.loss_fn is not None,
        build_optimizer=target.build_optimizer is not None,
        build_data=target.build_data is not None,
    )


def _leaf_text(leaf: Any) -> str:

    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
