"""Hugging Face models as targets, made from their configuration; no weights are read.

The setting ``lora`` freezes the model and adds adapters to some layers (``lora``), ``packed`` puts
several documents into a sequence; other settings are fields of the configuration.

``hf:PATH_OR_NAME`` is a folder with a ``config.json``, or a name in the local cache. The class is
the first of the configuration's ``architectures``; inputs and labels are random, chosen by the
names of its forward's arguments (``huggingface_batch``).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import MachineError, UsageError
from autoparallel.target.huggingface_batch import (
    POSITIONS,
    BatchSpec,
    default_sequence,
    joins_towers,
    label_names,
    make_batch,
)
from autoparallel.target.lora import Lora, add_lora, parse_lora
from autoparallel.target.target import Target, checked_batches

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_huggingface(text: str, settings: Mapping[str, Any]) -> Target:
    """Return the target of ``hf:PATH_OR_NAME``. ``settings`` override fields of the configuration.

    Raises MachineError AP401 without transformers, and UsageError AP101 (no configuration), AP105
    (unknown field) and AP109 (no class, or no loss).
    """
    transformers = _transformers()
    config = _config(transformers, text)
    fields = dict(settings)
    adapters = parse_lora(fields.pop("lora")) if "lora" in fields else None
    is_packed = fields.pop(PACKED, False)
    _apply_settings(config, fields, text)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = _model_class(transformers, config, text)
    if not label_names(model_class) and not joins_towers(model_class):
        raise UsageError(
            "AP109",
            f"{model_class.__name__} has no training loss: its forward takes no labels",
            where=text,
            fix="write a model file with build_model, example_batch and loss_fn around it",
        )
    _check_packed(is_packed, model_class, text)
    return Target(
        name=text,
        build_model=lambda: _build(model_class, config, adapters),
        example_batch=checked_batches(_example(model_class, config, text, packed=is_packed), text),
        settings=dict(settings),
    )


PACKED = "packed"
"""Setting with which sequences hold several documents, whose positions are an input."""

CAUSAL = re.compile("ForCausalLM|LMHeadModel")
"""Pattern of the names of classes that predict the next token."""


def is_causal(target: Target) -> bool:
    """Return whether a target is a causal language model from Hugging Face."""
    if not target.name.startswith("hf:"):
        return False
    model_class = _model_class(_transformers(), target_config(target), target.name)
    return CAUSAL.search(model_class.__name__) is not None


def target_config(target: Target) -> Any:
    """Return the configuration of an ``hf:`` target, with its settings."""
    return hub_config(target.name, target.settings)


def hub_config(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the configuration of the ``hf:`` target ``name``, with ``settings`` applied."""
    config = _config(_transformers(), name)
    fields = {name: value for name, value in settings.items() if name not in ("lora", PACKED)}
    _apply_settings(config, fields, name)
    return config


def model_place(target: str) -> str:
    """Return the folder of an ``hf:`` target or, for a model of the Hub, its name there."""
    place = Path(target.removeprefix("hf:"))
    return str(place.parent if place.name == "config.json" else place)


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


def _config(transformers: Any, text: str) -> Any:
    """Return a target's configuration. A name is looked up in the local cache here, because
    transformers asks the network about itself on the way."""
    from huggingface_hub import constants, try_to_load_from_cache

    place = model_place(text)
    found: Any = Path(place, "config.json")
    if not Path(place).is_dir():
        found = None
        with suppress(ValueError):  # of what cannot be a name
            found = try_to_load_from_cache(place, "config.json")
    elif not found.exists():
        raise UsageError("AP101", f"{place} holds no config.json", where=text)
    try:
        if not isinstance(found, str | Path):
            raise ValueError(f"it is no folder, and no name in {constants.HF_HUB_CACHE}")
        return transformers.AutoConfig.from_pretrained(
            str(Path(found).parent), local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            "AP101",
            f"there is no configuration {place!r}",
            why=str(error).splitlines()[0],
            where=text,
            fix="use a folder with a config.json, or a name in the local Hugging Face cache",
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
        f"found no model class for {type(config).__name__} (architectures: {config.architectures})",
        where=text,
        fix="add the class's name to the list architectures of config.json",
    )


def _build(model_class: Any, config: Any, adapters: Lora | None) -> nn.Module:
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # it takes any dtype
    model: nn.Module = model_class(config)
    if adapters is not None:
        add_lora(model, adapters)
    model.train()
    if joins_towers(model_class):
        model.forward = functools.partial(model.forward, return_loss=True)
    return model


def _check_packed(value: Any, model_class: Any, text: str) -> None:
    """Raise UsageError AP105 if ``value`` of the setting is not a bool, or the class takes no
    positions."""
    if not isinstance(value, bool):
        raise UsageError(
            "AP105",
            f"the setting {PACKED} is {value!r}, not True or False",
            where=text,
            fix=f"--set {PACKED}=True",
        )
    if value and POSITIONS not in inspect.signature(model_class.forward).parameters:
        raise UsageError(
            "AP105",
            f"{model_class.__name__} cannot be packed: its forward takes no {POSITIONS}",
            where=text,
            fix=f"leave the setting {PACKED} out",
        )


def _example(
    model_class: Any, config: Any, text: str, *, packed: bool
) -> Callable[[int, int | None], dict[str, Tensor]]:
    def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
        length = seq or default_sequence(config)
        return make_batch(BatchSpec(model_class, config, global_batch, length, packed), text)

    return example_batch
