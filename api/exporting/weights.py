"""Weights of a checkpoint as safetensors, as a ``.pt``, or as a Hugging Face folder.

In: a checkpoint (or any source that ``--weights`` accepts), and its target if known. Out: a folder,
written beside its path and renamed when complete. A single process without a process group does it,
and holds the tensors of one file at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from autoparallel.exporting.huggingface_folder import write_adapters, write_model_files
from autoparallel.exporting.new_folder import check_free, new_folder
from autoparallel.exporting.plans import CHECKPOINT_FORMATS
from autoparallel.options.parse import choice_error, parse_size
from autoparallel.passes.capture.repeats import find_tied
from autoparallel.passes.ops.nf4 import unpack_nf4
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import whole_region
from autoparallel.planning.capture import record_target
from autoparallel.planning.plan_files import PLAN, load_plan
from autoparallel.runtime.checkpoint.weight_files import (
    WeightFiles,
    find_checkpoint,
    open_weights,
    write_shards,
)
from autoparallel.target.load import load_target
from autoparallel.target.lora import Lora, is_transposed, merge_lora, parse_lora
from autoparallel.target.target import Target
from autoparallel.target.trust import check_trusted

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
LORA_ENDINGS = LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of exporting weights: folder, files with tensors, number and bytes of tensors."""

    folder: Path
    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class WeightSource:
    """Files of weights to export and, if known, the target that was trained, its model built on
    ``meta``, and the settings of its LoRA adapters."""

    files: WeightFiles
    target: Target | None = None
    model: nn.Module | None = None
    lora: Lora | None = None

    @property
    def adapted(self) -> tuple[str, ...]:
        """Paths of the layers that have adapters."""
        return tuple(
            name.removesuffix(LORA_A) for name in self.files.names() if name.endswith(LORA_A)
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, dequantized if the checkpoint holds it in NF4."""
        own = self._quantized.get(name)
        return self.files.shape(name) if own is None else tuple(own.shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a weight, which a quantized one shares with other frozen weights."""
        if name not in self._quantized:
            return self.files.dtype(name)
        others = (self.files.dtype(n) for n in self.files.names() if not n.endswith(LORA_ENDINGS))
        return next((each for each in others if each.is_floating_point), torch.float32)

    def read(self, name: str) -> Tensor:
        """Read a whole weight; dequantize it if the checkpoint holds it in NF4."""
        found = self.files.read(name, whole_region(self.files.shape(name)))
        if name not in self._quantized:
            return found
        return unpack_nf4(found, self.shape(name), self.dtype(name))

    @cached_property
    def _quantized(self) -> Mapping[str, nn.Parameter]:
        """Parameters of the model that the checkpoint holds as bytes."""
        named = () if self.model is None else self.model.named_parameters()
        have = set(self.files.names())
        return {
            name: own
            for name, own in named
            if name in have and self.files.dtype(name) == torch.uint8 != own.dtype
        }

    def names(self) -> tuple[str, ...]:
        """Return the names of the weights, with only one name of each tied tensor."""
        aliases = {} if self.model is None else find_tied(self.model)
        known = set(self.files.names())
        return tuple(
            name
            for name in self.files.names()
            if aliases.get(name, name) == name or aliases[name] not in known
        )


def export(  # noqa: PLR0913 - one parameter per option
    checkpoint: str | Path,
    folder: str | Path,
    *,
    to: str = "safetensors",
    model: str | None = None,
    lora: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
    trust: bool = False,
) -> Exported:
    """Write the weights of ``checkpoint`` (in a folder of checkpoints, the newest) to ``folder``.

    ``to`` is ``safetensors``, ``pt``, ``hf`` (safetensors with the files for ``from_pretrained``)
    or ``peft`` (only LoRA adapters). ``model`` is the target that was trained; the default is the
    target of the plan beside the checkpoint. If it is known, tied weights are written once and
    adapters are merged into the weights. ``lora`` overrides the target's setting. Floating-point
    tensors are cast to ``dtype``. ``max_shard_size`` limits the size of a file. ``trust`` allows a
    plan's target that is code outside the current folder.

    Raises UsageError: AP860 and AP861 if the weights cannot be read, AP869 for a folder that is not
    empty, AP870 for a wrong ``to`` or ``dtype``, AP871 if ``to`` needs a Hugging Face model, AP872
    if checkpoint and model have different parameters, AP155 if the plan's target is not trusted.
    """
    _check_choices(to, dtype)
    most_bytes = parse_size(max_shard_size)
    place = Path(folder)
    check_free(place, force)
    source = _source(Path(checkpoint), model, lora, trust=trust)
    if to in ("hf", "peft"):
        _check_huggingface(source, to)
    tensors = _adapter_tensors(source) if to == "peft" else _merged_tensors(source)
    cast = DTYPES[dtype] if dtype is not None else None
    sizes = {name: _num_bytes(source, name, cast) for name in tensors}

    def tensor(name: str) -> Tensor:
        made = tensors[name]()
        return made.to(cast) if cast is not None and made.is_floating_point() else made

    with new_folder(place) as temporary:
        if to == "peft":
            files = write_adapters(
                temporary,
                source.target,
                source.lora,
                source.adapted,
                {name: tensor(name) for name in tensors},
            )
        else:
            kind = "pt" if to == "pt" else "safetensors"
            files = write_shards(temporary, sizes, tensor, kind=kind, most_bytes=most_bytes)
        if to == "hf":
            assert source.target is not None
            stored = cast or _largest_dtype(source, tensors)
            write_model_files(temporary, source.target, str(stored).removeprefix("torch."))
    written = tuple(place / file.name for file in files)
    return Exported(place, written, len(tensors), sum(sizes.values()))


def _check_choices(to: str, dtype: str | None) -> None:
    for name, value, known in (("--to", to, CHECKPOINT_FORMATS), ("--dtype", dtype, tuple(DTYPES))):
        if value is not None and value not in known:
            raise choice_error("AP870", name, value, known)


def _source(checkpoint: Path, model: str | None, lora: str | None, *, trust: bool) -> WeightSource:
    """Open the weights of a checkpoint, and build the model of their target on ``meta``. The target
    is ``model``, else that of the plan beside the checkpoint, if any."""
    files = open_weights(checkpoint)
    target = _target(checkpoint, model, trust=trust)
    adapters = lora or (None if target is None else target.settings.get("lora"))
    built = None if target is None else record_target(target).model
    return WeightSource(files, target, built, parse_lora(adapters) if adapters else None)


def _target(checkpoint: Path, model: str | None, *, trust: bool) -> Target | None:
    """Return the target ``model``, or the target of the plan beside the checkpoint, else None."""
    if model is not None:
        is_folder = (Path(model) / "config.json").exists() and not model.startswith("hf:")
        return load_target(f"hf:{model}" if is_folder else model)
    found = find_checkpoint(checkpoint) or checkpoint
    for folder in (found, found.parent):
        if (folder / PLAN).is_file():
            plan = load_plan(folder / PLAN)
            check_trusted(plan, folder / PLAN, trust=trust)
            return load_target(plan.model.target, plan.model.settings)
    return None


def _check_huggingface(source: WeightSource, to: str) -> None:
    if source.target is None or not source.target.name.startswith("hf:"):
        raise UsageError(
            "AP871",
            f"--to {to} needs the Hugging Face model that was trained",
            why="the checkpoint's folder has no plan"
            if source.target is None
            else f"the target is {source.target.name}",
            fix="--model FOLDER, a folder with its config.json; or --to safetensors",
        )
    if to == "peft" and (not source.adapted or source.lora is None):
        raise UsageError(
            "AP871",
            "--to peft exports adapters, but the checkpoint has none"
            if not source.adapted
            else "the settings of the adapters are unknown",
            where=source.files.place,
            fix="--to hf" if not source.adapted else "--lora r=R,alpha=ALPHA, as it was trained",
        )


def _merged_tensors(source: WeightSource) -> dict[str, Callable[[], Tensor]]:
    """Map each tensor of the model to a function that reads it and merges its adapter.

    Raises UsageError AP871 if the settings of adapters are unknown, AP872 if names do not match.
    """
    adapted = source.adapted if source.model is not None else ()
    if adapted and source.lora is None:
        raise UsageError(
            "AP871",
            "the checkpoint has LoRA adapters whose settings are unknown",
            where=source.files.place,
            fix="--lora r=R,alpha=ALPHA, as it was trained",
        )
    names = [name for name in source.names() if not adapted or not name.endswith(LORA_ENDINGS)]
    _check_names(source, names)
    weights = {f"{path}.weight": path for path in adapted}
    return {
        name: _merger_of(source, weights[name]) if name in weights else _reader_of(source, name)
        for name in names
    }


def _check_names(source: WeightSource, names: list[str]) -> None:
    """Raise UsageError AP872 unless the checkpoint has exactly the parameters of the model."""
    if source.model is None:
        return
    tied = find_tied(source.model)
    have = {tied.get(name, name) for name in names}
    wanted = {
        name for name, _ in source.model.named_parameters() if not name.endswith(LORA_ENDINGS)
    }
    buffers = {name for name, _ in source.model.named_buffers()}
    missing, unknown = sorted(wanted - have), sorted(have - wanted - buffers)
    if missing or unknown:
        first = (missing or unknown)[0]
        assert source.target is not None
        raise UsageError(
            "AP872",
            f"the checkpoint does not belong to the model of {source.target.name}",
            why=f"it lacks {len(missing)} of its parameters and has {len(unknown)} others; "
            f"the first is {first}",
            where=source.files.place,
            fix="leave --model out where the plan is beside the checkpoint: it names the model; "
            "otherwise --model TARGET, the model that was trained",
        )


def _adapter_tensors(source: WeightSource) -> dict[str, Callable[[], Tensor]]:
    return {
        f"{path}{ending}": _reader_of(source, f"{path}{ending}")
        for path in source.adapted
        for ending in LORA_ENDINGS
    }


def _reader_of(source: WeightSource, name: str) -> Callable[[], Tensor]:
    return lambda: source.read(name)


def _merger_of(source: WeightSource, path: str) -> Callable[[], Tensor]:
    def merge() -> Tensor:
        assert source.lora is not None
        assert source.model is not None
        weight, a, b = (source.read(f"{path}{ending}") for ending in (".weight", *LORA_ENDINGS))
        transposed = is_transposed(source.model.get_submodule(path))
        return merge_lora(weight, a, b, source.lora.scale, transposed=transposed)

    return merge


def _num_bytes(source: WeightSource, name: str, cast: torch.dtype | None) -> int:
    stored = source.dtype(name)
    dtype = cast if cast is not None and stored.is_floating_point else stored
    return torch.Size(source.shape(name)).numel() * dtype.itemsize


def _largest_dtype(source: WeightSource, names: Mapping[str, object]) -> torch.dtype:
    found = [source.dtype(name) for name in names]
    floating = [dtype for dtype in found if dtype.is_floating_point]
    return max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)
