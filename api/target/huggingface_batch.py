"""Random batch for a Hugging Face class, from the names of its forward's arguments.

``INPUTS`` and ``LABELS`` make the tensor of each name. A batch has the main input, or all inputs if
the class contrasts several towers (as CLIP, ``return_loss``), and every label that it takes.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoparallel.planner.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SEQUENCE = 1024

POSITIONS = "position_ids"
"""Argument of a forward that takes the positions of tokens, which restart with each document."""

TOKEN_TASKS = re.compile(
    r"For(CausalLM|MaskedLM|ConditionalGeneration|PreTraining|CTC|TokenClassification)"
    r"|LMHeadModel|WithLMHead|ForSpeechSeq2Seq|EncoderDecoderModel"
)
"""Pattern of the names of classes with a label per token; other classes have a label per row."""

PARTS = ("text_config", "vision_config", "audio_config", "decoder", "encoder")


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Random batch to make for a Hugging Face model class: ``rows`` rows of ``length`` tokens, of
    several documents if they are ``packed``."""

    model_class: Any
    config: Any
    rows: int
    length: int
    packed: bool = False

    @property
    def task(self) -> str:
        return str(self.model_class.__name__)

    def field(self, *names: str) -> Any:
        return field_of(self.config, *names)

    @property
    def image_size(self) -> tuple[int, int]:
        size = self.field("image_size") or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return height, width


def field_of(config: Any, *names: str) -> Any:
    """Return the value of the first of ``names`` set in a configuration or its parts, else None."""
    owners = [config, *(getattr(config, part) for part in PARTS if hasattr(config, part))]
    for name in names:
        for owner in owners:
            if getattr(owner, name, None) is not None:
                return getattr(owner, name)
    return None


def default_sequence(config: Any) -> int:
    limit = field_of(config, "max_target_positions", "max_position_embeddings", "n_positions")
    return min(limit or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)


def label_names(model_class: Any) -> tuple[str, ...]:
    """Return a class's ``forward`` arguments that are labels, with which it returns a loss."""
    taken = inspect.signature(model_class.forward).parameters
    names = [name for name in LABELS if name in taken]
    if "MaskedImageModeling" not in model_class.__name__ and "bool_masked_pos" in names:
        names.remove("bool_masked_pos")
    return tuple(names)


def joins_towers(model_class: Any) -> bool:
    """Return whether a class can compute a contrastive loss over the batch (``return_loss``)."""
    return "return_loss" in inspect.signature(model_class.forward).parameters


def make_batch(wanted: BatchSpec, where: str) -> dict[str, Tensor]:
    """Make random inputs and labels. Raises UsageError AP109 for an unknown kind of main input."""
    main: str = wanted.model_class.main_input_name
    if main not in INPUTS:
        raise UsageError(
            "AP109",
            f"cannot generate example values for the main input {main!r}",
            where=where,
            fix="write a model file with build_model and example_batch around it",
        )
    taken = inspect.signature(wanted.model_class.forward).parameters
    names = [main]
    if joins_towers(wanted.model_class):
        names += [name for name in INPUTS if name in taken and name != main]
    batch = {name: INPUTS[name](wanted) for name in names}
    if wanted.packed:
        batch[POSITIONS] = _positions(wanted)
    return batch | {name: LABELS[name](wanted) for name in label_names(wanted.model_class)}


def _normal(*shape: int) -> Tensor:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), device="cpu")


def _integers(bound: int, *shape: int) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(bound, shape, generator=generator, device="cpu")


def _tokens(wanted: BatchSpec) -> Tensor:
    shape: tuple[int, ...] = (wanted.rows, wanted.length)
    if "MultipleChoice" in wanted.task:
        shape = (wanted.rows, NUM_CHOICES, wanted.length)
    return _integers(wanted.field("vocab_size"), *shape)


def _positions(wanted: BatchSpec) -> Tensor:
    """Make positions that restart with each of four documents."""
    import torch

    row = torch.arange(wanted.length, device="cpu") % max(1, wanted.length // 4)
    return row.repeat(wanted.rows, 1)


def _pixels(wanted: BatchSpec) -> Tensor:
    return _normal(wanted.rows, wanted.field("num_channels") or 3, *wanted.image_size)


def _features(wanted: BatchSpec) -> Tensor:
    frames = 2 * (wanted.field("max_source_positions") or 1500)
    return _normal(wanted.rows, wanted.field("num_mel_bins") or 80, frames)


def _values(wanted: BatchSpec) -> Tensor:
    """Make random audio inputs: a spectrogram, or a waveform that gives ``length`` frames."""
    frames, bins = wanted.field("max_length"), wanted.field("num_mel_bins")
    if frames and bins:
        return _normal(wanted.rows, frames, bins)
    strides = wanted.field("conv_stride") or ()
    kernels = wanted.field("conv_kernel") or ()
    samples = wanted.length + 1 if strides else wanted.length
    for stride, kernel in reversed(list(zip(strides, kernels, strict=True))):
        samples = (samples - 1) * stride + kernel
    return _normal(wanted.rows, samples)


def _labels(wanted: BatchSpec) -> Tensor:
    rows = wanted.rows
    if "Segmentation" in wanted.task:
        return _integers(wanted.config.num_labels, rows, *wanted.image_size)
    if TOKEN_TASKS.search(wanted.task) is None:
        bound = NUM_CHOICES if "MultipleChoice" in wanted.task else wanted.config.num_labels
        return _integers(bound, rows)
    is_tagging = "TokenClassification" in wanted.task
    classes = wanted.config.num_labels if is_tagging else wanted.field("vocab_size")
    return _integers(classes, rows, wanted.length)


def _mask_of_patches(wanted: BatchSpec) -> Tensor:
    """Return a mask of all image patches: a random mask would change the amount of computation."""
    import torch

    patch = wanted.field("patch_size") or 16
    return torch.ones(
        wanted.rows, math.prod(size // patch for size in wanted.image_size), dtype=torch.bool
    )


NUM_CHOICES = 2

INPUTS: Mapping[str, Callable[[BatchSpec], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _values,
}
"""Function that makes each input tensor, by name."""

LABELS: Mapping[str, Callable[[BatchSpec], Tensor]] = {
    "labels": _labels,
    "next_sentence_label": lambda wanted: _integers(2, wanted.rows),
    "start_positions": lambda wanted: _integers(wanted.length, wanted.rows),
    "end_positions": lambda wanted: _integers(wanted.length, wanted.rows),
    "bool_masked_pos": _mask_of_patches,
}
"""Function that makes each label tensor, by name."""
