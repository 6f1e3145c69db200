"""Hugging Face configuration of a plan's model, for systems that build the model themselves.

In: a plan. Out: the sizes of a decoder that Megatron-LM or torchtitan can build, or the reason why
there are none: the target is no Hugging Face configuration, or no decoder of uniform layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan
from autoparallel.target.huggingface import hub_config


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies for long sequences. ``kind`` is the ``rope_type`` of
    transformers; all fields after ``factor`` are of "llama3" (Llama 3.1)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder model; ``kind`` is the ``model_type`` in its ``config.json``."""

    kind: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float | None
    rope_scaling: RopeScaling | None
    is_tied: bool
    num_experts: int
    experts_per_token: int
    attention_dropout: float
    hidden_dropout: float
    window: int | None
    activation: str
    has_biases: bool


def read_config(plan: Plan) -> tuple[ModelConfig | None, str]:
    """Return the sizes of a plan's model and "", or None and the reason why they are unknown."""
    target = plan.model.target
    if not target.startswith("hf:"):
        return None, f"{target} is no Hugging Face configuration"

    try:
        config = hub_config(target, plan.model.settings)
    except AutoparallelError as error:
        return None, error.what
    try:
        return _sizes(config), ""
    except AttributeError as error:
        return None, f"{config.model_type} is no decoder of one size ({error})"


def _sizes(config: Any) -> ModelConfig:
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    hidden = config.hidden_size
    return ModelConfig(
        kind=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        intermediate_size=_first(config, "intermediate_size", "n_inner") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=float(_first(config, "rms_norm_eps", "layer_norm_epsilon") or 1e-5),
        rope_theta=rope.get("rope_theta"),
        rope_scaling=_rope_scaling(rope),
        is_tied=bool(config.tie_word_embeddings),
        num_experts=getattr(config, "num_local_experts", None) or 0,
        experts_per_token=getattr(config, "num_experts_per_tok", None) or 0,
        attention_dropout=float(_first(config, "attention_dropout", "attn_pdrop") or 0),
        hidden_dropout=float(_first(config, "resid_pdrop") or 0),
        window=_window(config),
        activation=_first(config, "hidden_act", "activation_function") or "",
        has_biases=any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias")),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or "default"
    if kind == "default":
        return None
    return RopeScaling(
        kind,
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_positions=int(rope.get("original_max_position_embeddings") or 8192),
    )


def unlike_llama(config: ModelConfig) -> Iterator[str]:
    """Yield properties of a model that are missing in other systems' Llama-like architectures."""
    if config.has_biases:
        yield "biases in attention or MLP"
    if config.activation != "silu":
        yield f"the activation {config.activation} in place of silu"
    if config.rope_scaling is not None and config.rope_scaling.kind != "llama3":
        yield f"rotary positions scaled by {config.rope_scaling.kind}"


def _first(config: Any, *names: str) -> Any:
    """Return the value of the first field in ``names`` that a configuration has and is not None."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def _window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    return window if window and getattr(config, "use_sliding_window", True) else None
