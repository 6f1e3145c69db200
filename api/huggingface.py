"""A Hugging Face model as a target: its configuration in, a Target out; no weights are read.

``hf:PATH_OR_NAME`` is a folder with a ``config.json`` or a name in the local cache. The
class is the first of the configuration's ``architectures``; inputs and labels are made up
from its main input and task.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.options import did_you_mean
from autoparallel.planner.errors import MachineError, UsageError
from autoparallel.targets import Target, checked_batches

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT_SEQUENCE = 1024

TOKEN_TASKS = re.compile(
    r"For(CausalLM|MaskedLM|ConditionalGeneration|PreTraining|TokenClassification)"
    r"|LMHeadModel|WithLMHead|ForSpeechSeq2Seq"
)
"""Classes whose labels are one per token; every other task's labels are one per row."""


def load_huggingface(text: str, settings: Mapping[str, Any]) -> Target:
    """The target of ``hf:PATH_OR_NAME``. ``settings`` replace fields of the configuration.

    Raises MachineError AP401 without transformers and UsageError AP101, AP105 and AP109.
    """
    transformers = _transformers()
    config = _config(transformers, text.removeprefix("hf:"), text)
    _apply_settings(config, settings, text)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = _model_class(transformers, config, text)
    if "labels" not in inspect.signature(model_class.forward).parameters:
        raise UsageError(
            "AP109",
            f"{model_class.__name__} has no training loss: its forward takes no labels",
            where=text,
            fix="plan a file with build_model, example_batch and loss_fn around it",
        )
    return Target(
        name=text,
        build_model=lambda: _build(model_class, config),
        example_batch=checked_batches(_example(model_class, config, text), text),
        settings=dict(settings),
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            "AP401",
            "hf: targets need the package transformers",
            why=str(error),
            fix="pip install 'torch-autoparallel[hf]'",
        ) from error
    return transformers


def _config(transformers: Any, place: str, text: str) -> Any:
    folder = Path(place)
    if folder.name == "config.json":
        folder = folder.parent
    if folder.is_dir() and not (folder / "config.json").exists():
        raise UsageError("AP101", f"{folder} holds no config.json", where=text)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(folder) if folder.is_dir() else place, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            "AP101",
            f"there is no configuration {place!r}",
            why=str(error).splitlines()[0],
            where=text,
            fix="give a folder with a config.json, or a name in the local Hugging Face cache",
        ) from error


def _apply_settings(config: Any, settings: Mapping[str, Any], text: str) -> None:
    for name, value in settings.items():
        owner = config
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if not hasattr(owner, last):
            raise UsageError(
                "AP105",
                f"the configuration has no field {name!r}",
                where=text,
                fix=did_you_mean(last, list(config.to_dict())) or "see its config.json",
            )
        setattr(owner, last, value)


def _model_class(transformers: Any, config: Any, text: str) -> Any:
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple | list) else found
    raise UsageError(
        "AP109",
        f"no class for {type(config).__name__} (architectures: {config.architectures})",
        where=text,
        fix="write the class's name into the list architectures of config.json",
    )


def _build(model_class: Any, config: Any) -> nn.Module:
    model: nn.Module = model_class(config)
    model.train()
    return model


def _example(
    model_class: Any, config: Any, text: str
) -> Callable[[int, int | None], dict[str, Tensor]]:
    main: str = model_class.main_input_name

    def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
        length = seq or _default_sequence(config)
        return {
            main: _main_input(main, config, (global_batch, length), text),
            "labels": _labels(model_class, config, (global_batch, length)),
        }

    return example_batch


def field_of(config: Any, *names: str) -> Any:
    """The first of ``names`` that the configuration or one of its parts has, or None."""
    parts = ("text_config", "vision_config", "audio_config")
    owners = [config, *(getattr(config, part) for part in parts if hasattr(config, part))]
    for name in names:
        for owner in owners:
            if getattr(owner, name, None) is not None:
                return getattr(owner, name)
    return None


def _default_sequence(config: Any) -> int:
    limit = field_of(config, "max_target_positions", "max_position_embeddings", "n_positions")
    return min(limit or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)


def _main_input(main: str, config: Any, shape: tuple[int, int], text: str) -> Tensor:
    """Random values of the main input; ``shape`` is (batch, sequence)."""
    import torch

    rows, length = shape
    generator = torch.Generator().manual_seed(0)
    if main == "input_ids":
        return torch.randint(
            field_of(config, "vocab_size"), shape, generator=generator, device="cpu"
        )
    if main == "pixel_values":
        size = field_of(config, "image_size") or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = field_of(config, "num_channels") or 3
        return torch.randn(rows, channels, height, width, generator=generator, device="cpu")
    if main == "input_features":
        bins = field_of(config, "num_mel_bins") or 80
        frames = 2 * (field_of(config, "max_source_positions") or 1500)
        return torch.randn(rows, bins, frames, generator=generator, device="cpu")
    if main == "input_values":
        return torch.randn(rows, length, generator=generator, device="cpu")
    raise UsageError(
        "AP109",
        f"inputs cannot be made up for the main input {main!r}",
        where=text,
        fix="plan a file with build_model and example_batch around it",
    )


def _labels(model_class: Any, config: Any, shape: tuple[int, int]) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(1)
    per_token = TOKEN_TASKS.search(model_class.__name__) is not None
    tokens = per_token and "TokenClassification" not in model_class.__name__
    classes = field_of(config, "vocab_size") if tokens else config.num_labels
    return torch.randint(
        classes, shape if per_token else shape[:1], generator=generator, device="cpu"
    )
