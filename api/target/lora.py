"""LoRA: linear layers with a trained product of two small matrices beside frozen weights.

    y = W x + (alpha / r) B A x          (Hu et al. 2021, arXiv:2106.09685, equation 3)

In: a built model and ``r=8,alpha=16``. Out: the same model with its weights frozen under their own
names, and ``lora_A.weight`` (r x in) and ``lora_B.weight`` (out x r, initially zero) beside each
adapted ``weight``; the names are those of peft without its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoparallel.cost_model.ops.memory import NF4
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

USUAL_TARGETS = (
    ("q_proj", "v_proj"),
    ("c_attn",),
    ("query_key_value",),
    ("qkv_proj",),
    ("Wqkv",),
    ("query", "value"),
    ("q", "v"),
)
"""Default layers to adapt: the first of these groups that the model has completely, as in peft."""

ALL_LINEAR = "all-linear"
EXAMPLE = "for example: --lora r=8,alpha=16,targets=q_proj+v_proj"
NEW_PARAMETERS = r"\.lora_[AB]\."
"""Pattern in the names of the adapters' parameters."""


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA settings: ``rank``, ``alpha``, and last names of the layers to adapt, () for default.

    ``base``: the format in which the weights of the blocks' linear layers are held, "nf4" or "" for
    the format of the compute.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    base: str = ""

    @property
    def scale(self) -> float:
        """Factor alpha / rank of the adapter's product."""
        return self.alpha / self.rank


def parse_lora(text: str) -> Lora:
    """Parse the text of ``--lora``. Raises UsageError AP867 if it is invalid.

    >>> parse_lora("r=4,alpha=8,targets=q_proj+v_proj")
    Lora(rank=4, alpha=8.0, targets=('q_proj', 'v_proj'), base='')
    """
    known = ("r", "alpha", "targets", "base")
    given: dict[str, str] = {}
    for item in str(text).split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not value or name not in known or name in given:
            raise UsageError(
                "AP867",
                f"--lora: {item.strip()!r} is not r=, alpha=, targets= or base=, or is repeated",
                where=f"--lora {text}",
                fix=did_you_mean(name, known) or EXAMPLE,
            )
        given[name] = value
    try:
        rank, alpha = int(given.get("r", "8")), float(given.get("alpha", "16"))
    except ValueError:
        rank, alpha = 0, 0.0
    if rank < 1 or not 0 < alpha < float("inf"):
        raise UsageError(
            "AP867",
            "--lora: r must be a whole number of at least 1 and alpha a number above 0",
            where=f"--lora {text}",
            fix=EXAMPLE,
        )
    base = given.get("base", "")
    if base not in ("", NF4):
        raise UsageError(
            "AP867",
            f"--lora: base is {base!r}, not {NF4}",
            where=f"--lora {text}",
            fix=f"base={NF4} quantizes the frozen weights; without it they are in the format of "
            "the compute",
        )
    targets = tuple(name for name in given.get("targets", "").split("+") if name)
    return Lora(rank, alpha, targets, base)


def add_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Freeze ``model`` and add adapters to its target layers, in place; return it.

    Raises UsageError AP867 if it has no such layers.
    """
    from torch import nn

    paths = target_paths(model, lora)
    quantized = quantized_paths(model) if lora.base else ()
    model.requires_grad_(False)
    for path in quantized:
        model.get_submodule(path).stored_weight = lora.base  # type: ignore[assignment]
    for path in paths:
        layer = model.get_submodule(path)
        num_inputs, num_outputs = _sizes(layer)
        layer.__class__ = _adapted_class(type(layer))
        layer.lora_scale = lora.scale  # type: ignore[assignment]
        layer.lora_A = nn.Linear(num_inputs, lora.rank, bias=False)
        layer.lora_B = nn.Linear(lora.rank, num_outputs, bias=False)
        nn.init.zeros_(layer.lora_B.weight)
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    model._keys_to_ignore_on_load_missing = [*ignored, NEW_PARAMETERS]  # type: ignore[assignment]
    return model


def target_paths(model: nn.Module, lora: Lora) -> tuple[str, ...]:
    """Return the paths of the layers to adapt. Raises UsageError AP867 if the model has none."""
    layers = {path: module for path, module in model.named_modules() if _is_linear(module)}
    last_names = {path: path.rpartition(".")[2] for path in layers}
    if lora.targets == (ALL_LINEAR,):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        return tuple(path for path, layer in layers.items() if layer is not head)
    have = set(last_names.values())
    usual = next((names for names in USUAL_TARGETS if have.issuperset(names)), ())
    wanted = lora.targets or usual
    unknown = [name for name in wanted if name not in have]
    if unknown or not wanted:
        raise UsageError(
            "AP867",
            f"--lora: {type(model).__name__} has no linear layer named {unknown[0]!r}"
            if unknown
            else f"--lora: {type(model).__name__} has none of the default layers",
            why=f"its linear layers are {', '.join(sorted(have)) or 'none'}",
            fix=did_you_mean(unknown[0] if unknown else "", sorted(have))
            or f"name them with targets=A+B, or targets={ALL_LINEAR}",
        )
    return tuple(path for path, name in last_names.items() if name in wanted)


def quantized_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the layers whose weights ``base`` quantizes: every ``nn.Linear`` of the
    blocks (in an ``nn.ModuleList``), as in torchtune and bitsandbytes, so neither the embeddings
    nor the head. Raises UsageError AP868 if the model has none."""
    from torch import nn

    blocks = [f"{path}." for path, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    found = tuple(
        path
        for path, each in model.named_modules()
        if isinstance(each, nn.Linear) and path.startswith(tuple(blocks))
    )
    if not found:
        raise UsageError(
            "AP868",
            f"--lora: {type(model).__name__} has no nn.Linear in its blocks to quantize",
            why="base=nf4 quantizes those alone, not Conv1D, experts, embeddings or the head",
            fix="leave base=nf4 out",
        )
    return found


def _is_linear(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Return whether a layer's weight is inputs x outputs, as in transformers' ``Conv1D``."""
    from torch import nn

    return not isinstance(module, nn.Linear)


def _sizes(layer: nn.Module) -> tuple[int, int]:
    weight = layer.weight
    first, second = (int(size) for size in weight.shape)  # type: ignore[union-attr]
    return (first, second) if is_transposed(layer) else (second, first)


class _Adapter:
    """Base class whose forward adds an adapter's product to the output of the layer's own class."""

    lora_A: Any  # noqa: N815 - peft's name
    lora_B: Any  # noqa: N815
    lora_scale: float

    def forward(self, inputs: Tensor) -> Tensor:
        own: Tensor = super().forward(inputs)  # type: ignore[misc]
        product: Tensor = self.lora_B(self.lora_A(inputs))
        return own + product * self.lora_scale


def _adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Lora{kind.__name__}", (_Adapter, kind), {})
    return _CLASSES[kind]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Adapted class of each layer class; shared, so that equal layers have the same class."""


def merge_lora(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """Add an adapter's product to a layer's weight, and return it in the weight's dtype.

    ``weight`` is outputs x inputs, or inputs x outputs if ``transposed``.
    """
    product = (b.double() @ a.double()) * scale
    change = product.T if transposed else product
    return (weight.double() + change).to(weight.dtype)
