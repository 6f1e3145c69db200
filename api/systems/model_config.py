"""Hugging Face configuration of a plan's model, for systems that build the model themselves.

In: a plan. Out: the sizes of a decoder that Megatron-LM or torchtitan can build, or the reason why
there are none: the target is no Hugging Face configuration, or no decoder of uniform layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan
from autoparallel.target.huggingface import hub_config


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies for long sequences. ``kind`` is the ``rope_type`` of
    transformers; the frequency factors are of "llama3" (Llama 3.1), the fields after
    ``original_positions`` of "yarn"."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a model and their router.

    ``layers`` says of each layer whether it has ``count`` experts of ``width`` channels, of which
    ``per_token`` compute a token; ``shared_width`` channels compute every token, weighted by a gate
    if ``gates_shared``. The router chooses the highest scores, with a bias if ``has_bias``, in the
    best ``chosen_groups`` of ``num_groups`` groups. It weights outputs, or with ``weighs_inputs``
    inputs, by scores without the bias, divided by their sum if ``normalizes``, times ``scale``.
    """

    count: int
    per_token: int
    width: int
    layers: tuple[bool, ...]
    shared_width: int = 0
    gates_shared: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: bool = True
    has_bias: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2): ranks of queries (0: one product) and of
    keys with values, and sizes of a head's parts without and with positions and of its values."""

    query_rank: int
    key_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder model; ``kind`` is the ``model_type`` in its ``config.json``.

    ``intermediate_size`` is of layers without experts. ``windowed_layers`` are the indices of
    layers with attention over ``window`` positions, ``rotary_layers`` says of each layer whether it
    has rotary positions. ``query_norm``: norm of queries and keys, of each head, over all heads
    ("whole") or without weights ("l2"). ``glu_limit``: bound of the inputs of GPT-OSS's activation.
    ``has_multipliers``: constant factors of embeddings, residuals, scores or logits (Granite).
    """

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
    experts: Experts | None
    latent: LatentAttention | None
    attention_dropout: float
    hidden_dropout: float
    window: int | None
    windowed_layers: tuple[int, ...]
    chunk: int | None
    rotary_layers: tuple[bool, ...]
    rotary_share: float
    query_norm: Literal["", "head", "whole", "l2"]
    activation: str
    has_biases: bool
    has_qkv_bias: bool
    glu_limit: float | None
    has_multipliers: bool
    init_std: float

    @property
    def yarn(self) -> RopeScaling | None:
        """Scaling of rotary positions if it is YaRN's."""
        is_yarn = self.rope_scaling is not None and self.rope_scaling.kind == "yarn"
        return self.rope_scaling if is_yarn else None


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
    kind, heads, hidden = config.model_type, config.num_attention_heads, config.hidden_size
    window, windowed = _windows(config)
    types = getattr(config, "layer_types", None) or ()
    dense = ("intermediate_size_mlp", "intermediate_size", "n_inner")
    return ModelConfig(
        kind=kind,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        intermediate_size=_first(config, *dense) or 4 * hidden,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=float(_first(config, "rms_norm_eps", "layer_norm_epsilon") or 1e-5),
        rope_theta=rope.get("rope_theta"),
        rope_scaling=_rope_scaling(rope),
        is_tied=bool(config.tie_word_embeddings),
        experts=_experts(config),
        latent=_latent(config),
        attention_dropout=float(_first(config, "attention_dropout", "attn_pdrop") or 0),
        hidden_dropout=float(_first(config, "resid_pdrop") or 0),
        window=window,
        windowed_layers=windowed,
        chunk=config.attention_chunk_size if "chunked_attention" in types else None,
        rotary_layers=tuple(map(bool, getattr(config, "no_rope_layers", None) or ())),
        rotary_share=float(rope.get("partial_rotary_factor") or 1.0),
        query_norm=_query_norm(config),
        activation=_first(config, "hidden_act", "activation_function") or "",
        has_biases=kind not in QKV_BIASES
        and any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias")),
        has_qkv_bias=kind in QKV_BIASES
        and bool(_first(config, "qkv_bias", "attention_bias") or kind == "qwen2"),
        glu_limit=getattr(config, "swiglu_limit", None),
        has_multipliers=_has_multipliers(config),
        init_std=float(getattr(config, "initializer_range", None) or 0.02),
    )


QKV_BIASES = ("qwen2", "qwen2_moe", "glm4_moe")
"""Architectures whose biases in attention are those of queries, keys and values alone."""

SIGMOID = ("deepseek_v3", "glm4_moe", "llama4_text")
"""Architectures whose routers score by a sigmoid; others by a softmax."""


def _experts(config: Any) -> Experts | None:
    count = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    if not count:
        return None
    kind = config.model_type
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    shared = _first(config, "shared_expert_intermediate_size") or 0
    if shared_count := _first(config, "n_shared_experts"):
        shared = shared_count * width
    return Experts(
        count=count,
        per_token=config.num_experts_per_tok,
        width=width,
        layers=tuple(_has_experts(config, index) for index in range(config.num_hidden_layers)),
        shared_width=width if kind == "llama4_text" else shared,
        gates_shared=kind == "qwen2_moe",
        score="sigmoid" if kind in SIGMOID else "softmax",
        normalizes=bool(getattr(config, "norm_topk_prob", kind != "llama4_text")),
        has_bias=kind in ("deepseek_v3", "glm4_moe"),
        num_groups=_first(config, "n_group") or 1,
        chosen_groups=_first(config, "topk_group") or 1,
        scale=float(_first(config, "routed_scaling_factor") or 1.0),
        weighs_inputs=kind == "llama4_text",
    )


def _has_experts(config: Any, index: int) -> bool:
    """Return whether layer ``index`` of a model of experts has experts."""
    if (chosen := getattr(config, "moe_layers", None)) is not None:
        return index in chosen
    if index < (getattr(config, "first_k_dense_replace", None) or 0):
        return False
    if index in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return (index + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0


def _latent(config: Any) -> LatentAttention | None:
    if not getattr(config, "kv_lora_rank", None):
        return None
    return LatentAttention(
        query_rank=config.q_lora_rank or 0,
        key_rank=config.kv_lora_rank,
        plain_dim=config.qk_nope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
    )


def _query_norm(config: Any) -> Literal["", "head", "whole", "l2"]:
    kind, uses_norm = config.model_type, getattr(config, "use_qk_norm", False)
    if kind == "llama4_text":
        return "l2" if uses_norm else ""
    if kind == "olmoe":
        return "whole"
    return "head" if kind in ("qwen3", "qwen3_moe") or uses_norm else ""


def _has_multipliers(config: Any) -> bool:
    neutral = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    if (scale := getattr(config, "attention_multiplier", None)) is not None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return bool(abs(scale - dim**-0.5) > 1e-6) or any(
            getattr(config, name, value) != value for name, value in neutral.items()
        )
    return False


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
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(rope.get("mscale") or 1.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def unlike_llama(config: ModelConfig, scalings: tuple[str, ...] = ("llama3",)) -> Iterator[str]:
    """Yield properties of a model that are missing in other systems' Llama-like architectures;
    ``scalings`` are kinds of rotary scaling that the system has."""
    if config.has_biases:
        yield "biases in attention or MLP"
    if config.activation != "silu":
        yield f"the activation {config.activation} in place of silu"
    if config.rope_scaling is not None and config.rope_scaling.kind not in scalings:
        yield f"rotary positions scaled by {config.rope_scaling.kind}"
    if config.query_norm == "whole":
        yield "a norm over all heads of queries, and of keys"
    if config.has_multipliers:
        yield "constant factors of embeddings, residuals, scores or logits"
    if config.chunk is not None:
        yield f"attention within chunks of {config.chunk} positions"


def _first(config: Any, *names: str) -> Any:
    """Return the value of the first field in ``names`` that a configuration has and is not None."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def _windows(config: Any) -> tuple[int | None, tuple[int, ...]]:
    """Return the window of attention and the indices of layers that have it."""
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None, ()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    found = tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
    return (window, found) if found else (None, ())
