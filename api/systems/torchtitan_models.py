"""Models for torchtitan, as Python that builds them of torchtitan's modules.

In: the sizes of a decoder from its Hugging Face configuration. Out: the text of the functions
``layer`` and ``model_spec``, and the properties of the model that they lack. Modules are those of
the main branch of August 2026 (commit b5bcd76). Source: ``torchtitan/models/common/`` and the
``__init__.py`` of each model.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autoparallel.planner.configured.configuration import Configuration
from autoparallel.systems.model_config import Experts, ModelConfig, unlike_llama
from autoparallel.systems.python_text import Code, call, literal
from autoparallel.systems.system import Deviation

FAMILIES: Mapping[str, str] = {
    "llama": "llama3",
    "mistral": "llama3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "mixtral": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
}
"""torchtitan's model of whose modules a Hugging Face architecture is built."""

ADAPTED = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Architectures whose Hugging Face checkpoints torchtitan converts."""

PREFIXES: Mapping[str, tuple[str, str]] = {
    "llama3": ("Llama3", "parallelize_llama"),
    "qwen3": ("Qwen3", "parallelize_qwen3"),
    "deepseek_v3": ("DeepSeekV3", "parallelize_deepseekv3"),
    "gpt_oss": ("GptOss", "parallelize_gptoss"),
}
"""Prefix of the class names of a model, and its function that parallelizes it."""

COMMON = "torchtitan.models.common"
MODULES: Mapping[str, tuple[str, ...]] = {
    "dataclasses": ("dataclass",),
    "functools": ("partial",),
    "pathlib": ("Path",),
    "torch": ("nn",),
    "torchtitan.components.data": ("ConcatThenSplitPackingConfig", "GrainDataLoader"),
    "torchtitan.components.loss": ("CrossEntropyLoss",),
    "torchtitan.components.optimizer": (
        "OptimizersContainer",
        "ParamGroupConfig",
        "default_adamw",
        "register_moe_load_balancing_hook",
    ),
    "torchtitan.components.quantization": (
        "Float8GroupedExpertsConverter",
        "Float8LinearConverter",
    ),
    "torchtitan.config": ("CompileConfig", "ParallelismConfig", "TrainingConfig"),
    "torchtitan.distributed.activation_checkpoint": ("FullAC", "SelectiveAC"),
    "torchtitan.distributed.pipeline_parallel": ("pipeline_llm",),
    "torchtitan.hf_datasets.text_datasets": ("DATASETS",),
    COMMON: ("ComplexRoPE", "CosSinRoPE", "Embedding", "Linear", "RMSNorm"),
    f"{COMMON}.attention": ("FlexAttention", "FusedQKVLinear"),
    f"{COMMON}.config_utils": (
        "make_ffn_config",
        "make_gqa_config",
        "make_moe_config",
        "make_routed_experts_config",
        "make_router_config",
        "make_token_dispatcher_config",
    ),
    f"{COMMON}.linear": ("ScaledBiasRowwiseLinear",),
    f"{COMMON}.moe": ("RoutedExperts",),
    f"{COMMON}.param_init": ("skip_param_init",),
    "torchtitan.models.deepseek_v3": ("make_mla_attention_config",),
    "torchtitan.models.gpt_oss.model": ("Attention",),
    "torchtitan.models.gpt_oss.moe": ("GptOssGroupedExperts", "GptOssMoE"),
    "torchtitan.protocols.model_spec": ("ModelSpec",),
    "torchtitan.trainer": ("Trainer",),
}
"""Names that a written file may import, by module, besides those of one model."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """Python text that builds a model, torchtitan's model of whose modules it is built ("" for
    none), differences from the model, and tasks for the user."""

    text: str
    family: str = ""
    lost: tuple[Deviation, ...] = ()
    notes: tuple[str, ...] = ()


def modules_of(family: str) -> Mapping[str, Iterable[str]]:
    """Return the names that a file with a model of ``family`` may import, by module."""
    if not family:
        return MODULES
    prefix, parallelize = PREFIXES[family]
    path = f"torchtitan.models.{family}"
    names = {
        f"{path}.model": (f"{prefix}Model", f"{prefix}TransformerBlock"),
        f"{path}.parallelize": (parallelize,),
        f"{path}.state_dict_adapter": (f"{prefix}StateDictAdapter",),
    }
    return {**MODULES, **{key: (*MODULES.get(key, ()), *own) for key, own in names.items()}}


def missing_model(reason: str) -> ModelText:
    """Return a ``model_spec`` that stops torchtitan with ``reason``: the user has to write it."""
    text = f'''def model_spec() -> ModelSpec:
    """The planned model, which is left to you."""
    raise NotImplementedError({literal(reason)})
'''
    return ModelText(text)


def model_text(config: ModelConfig, own: Configuration, seq: int) -> ModelText:
    """Return the text that builds a model, for sequences of ``seq`` positions."""
    family = FAMILIES.get(config.kind)
    if family is None:
        reason = f"torchtitan has no {config.kind}: write model_spec of its modules"
        missing = Deviation(f"the model, {config.kind}", "none: write model_spec in the file")
        return ModelText(missing_model(reason).text, lost=(missing,))
    rope = _rope(
        config, seq, "ComplexRoPE" if family in ("llama3", "deepseek_v3") else "CosSinRoPE"
    )
    text = "\n\n".join(
        (
            _constants(config),
            f"ROPE = {rope}\n",
            _layer(config, family),
            _spec(config, own, family),
        )
    )
    lost = tuple(_unlike(config, own, family))
    return ModelText(text, family, lost, tuple(_refusals(config, own)))


def _constants(config: ModelConfig) -> str:
    std = config.init_std
    text = f"""INIT = {{"weight": partial(nn.init.normal_, std={std!r}), "bias": nn.init.zeros_}}"""
    if config.experts is None:
        return text
    if config.kind == "gpt_oss":
        return f"""{text}
EXPERT_INIT = {{
    "mlp1_weight_EGD": INIT["weight"],
    "mlp1_bias_EG": INIT["bias"],
    "mlp2_weight_EDF": INIT["weight"],
    "mlp2_bias_ED": INIT["bias"],
}}"""
    return f"""{text}
EXPERT_INIT = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), INIT["weight"])"""


def _rope(config: ModelConfig, seq: int, name: str) -> Code:
    scaling, latent = config.rope_scaling, config.latent
    values: dict[str, object] = {
        "dim": config.head_dim if latent is None else latent.rotary_dim,
        "max_context_length": max(config.max_positions, seq),
        "theta": float(config.rope_theta or 10000.0),
    }
    if scaling is not None and scaling.kind == "llama3":
        values |= {
            "scaling": "llama",
            "scaling_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    if (yarn := config.yarn) is not None:
        values |= {
            "scaling": "yarn",
            "rope_factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "original_seq_len": yarn.original_positions,
            "truncate": yarn.truncate,
        }
    return call(f"{name}.Config", **values)


def _layer(config: ModelConfig, family: str) -> str:
    """Write the function ``layer``, which configures the layer of an index."""
    norm = call("RMSNorm.Config", normalized_shape=config.hidden_size)
    experts = config.experts
    is_mixed = experts is not None and not all(experts.layers)
    values: dict[str, object] = {
        "attention": _attention(config, family),
        "attention_norm": norm,
        "ffn_norm": norm,
    }
    if experts is None or is_mixed:
        ffn = _feed_forward(config, config.intermediate_size)
        values["feed_forward"] = Code(f"{ffn} if is_dense else None") if is_mixed else ffn
    if experts is not None:
        moe = _gpt_oss_experts(config, experts) if family == "gpt_oss" else _moe(config, experts)
        values["moe"] = Code(f"None if is_dense else {moe}") if is_mixed else moe
    block = f"{PREFIXES[family][0]}TransformerBlock.Config"
    lines = ['"""Configure layer ``index``."""']
    if experts is not None and is_mixed:
        dense = tuple(index for index, has in enumerate(experts.layers) if not has)
        lines.append(f"is_dense = index in {dense!r}")
    lines.append(f"return {call(block, **values)}")
    return f"def layer(index: int) -> {block}:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def _attention(config: ModelConfig, family: str) -> Code:
    rope, flex = Code("ROPE"), call("FlexAttention.Config")
    shared: dict[str, object] = {
        "dim": config.hidden_size,
        "n_heads": config.num_heads,
    }
    if config.latent is not None:
        yarn = config.yarn
        return call(
            "make_mla_attention_config",
            layer_id=Code("index"),
            **shared,
            q_lora_rank=config.latent.query_rank,
            kv_lora_rank=config.latent.key_rank,
            qk_nope_head_dim=config.latent.plain_dim,
            qk_rope_head_dim=config.latent.rotary_dim,
            v_head_dim=config.latent.value_dim,
            mscale=yarn.mscale_all_dim or yarn.mscale if yarn is not None else 1.0,
            attn_backend="flex",
            linear_init=Code("INIT"),
            norm_init=Code('{"weight": nn.init.ones_}'),
            depth_init=Code("lambda _: INIT"),
            rope=rope,
        )
    shared |= {"n_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    if family == "gpt_oss":
        return _gpt_oss_attention(config, shared)
    norm = {}
    if config.query_norm == "head":
        norm = {"qk_norm": call("RMSNorm.Config", normalized_shape=config.head_dim)}
    return call(
        "make_gqa_config",
        **shared,
        wqkv_param_init=Code("INIT"),
        wo_param_init=Code("INIT"),
        inner_attention=flex,
        fuse_qkv=True,
        rope=rope,
        **norm,
    )


def _gpt_oss_attention(config: ModelConfig, shared: Mapping[str, object]) -> Code:
    heads, key_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    with_bias = {"bias": True, "param_init": Code("INIT")}
    qkv = call(
        "FusedQKVLinear.Config",
        head_dim=dim,
        n_heads=heads,
        n_kv_heads=key_heads,
        wqkv=call(
            "Linear.Config",
            in_features=config.hidden_size,
            out_features=(heads + 2 * key_heads) * dim,
            **with_bias,
        ),
    )
    out = call(
        "ScaledBiasRowwiseLinear.Config",
        in_features=heads * dim,
        out_features=config.hidden_size,
        **with_bias,
    )
    window: object = config.window
    if 0 < len(config.windowed_layers) < config.num_layers:
        window = Code(f"{config.window} if index in {config.windowed_layers!r} else None")
    return call(
        "Attention.Config",
        **shared,
        qkv_linear=qkv,
        wo=out,
        inner_attention=call("FlexAttention.Config"),
        sliding_window_size=window,
        param_init=Code('{"sinks": INIT["weight"]}'),
        rope=Code("ROPE"),
    )


def _feed_forward(config: ModelConfig, width: int) -> Code:
    return call(
        "make_ffn_config",
        dim=config.hidden_size,
        hidden_dim=width,
        w1_param_init=Code("INIT"),
        w2w3_param_init=Code("INIT"),
    )


def _router(config: ModelConfig, experts: Experts, *, bias: bool) -> Code:
    groups = {}
    if experts.num_groups > 1:
        groups = {
            "num_expert_groups": experts.num_groups,
            "num_limited_groups": experts.chosen_groups,
        }
    return call(
        "make_router_config",
        dim=config.hidden_size,
        num_experts=experts.count,
        gate_param_init=Code("INIT"),
        top_k=experts.per_token,
        score_func=experts.score,
        route_norm=experts.normalizes,
        route_scale=experts.scale,
        **groups,
        bias=bias,
    )


def _moe(config: ModelConfig, experts: Experts) -> Code:
    shared = {}
    if experts.shared_width:
        shared = {"shared_experts": _feed_forward(config, experts.shared_width)}
    return call(
        "make_moe_config",
        num_experts=experts.count,
        router=_router(config, experts, bias=False),
        routed_experts=call(
            "make_routed_experts_config",
            dim=config.hidden_size,
            hidden_dim=experts.width,
            num_experts=experts.count,
            top_k=experts.per_token,
            param_init=Code("EXPERT_INIT"),
            comm_backend="standard",
        ),
        **shared,
        load_balance_coeff=1e-3 if experts.has_bias else None,
    )


def _gpt_oss_experts(config: ModelConfig, experts: Experts) -> Code:
    inner = call(
        "GptOssGroupedExperts.Config",
        dim=config.hidden_size,
        hidden_dim=experts.width,
        num_experts=experts.count,
        swiglu_limit=config.glu_limit,
        param_init=Code("EXPERT_INIT"),
    )
    dispatcher = call(
        "make_token_dispatcher_config",
        num_experts=experts.count,
        top_k=experts.per_token,
        comm_backend="standard",
        hidden_dim=config.hidden_size,
    )
    return call(
        "GptOssMoE.Config",
        num_experts=experts.count,
        router=_router(config, experts, bias=True),
        routed_experts=call(
            "RoutedExperts.Config", inner_experts=inner, token_dispatcher=dispatcher
        ),
        load_balance_coeff=None,
    )


def _spec(config: ModelConfig, own: Configuration, family: str) -> str:
    """Write the function ``model_spec``, which puts the layers together."""
    is_tied = config.is_tied and own.pp == 1
    prefix, parallelize = PREFIXES[family]
    hidden, vocab = config.hidden_size, config.vocab_size
    init = Code('{"weight": skip_param_init}' if is_tied else "INIT")
    tied = {"enable_weight_tying": True} if is_tied else {}
    model = call(
        f"{prefix}Model.Config",
        dim=hidden,
        vocab_size=vocab,
        **tied,
        tok_embeddings=call(
            "Embedding.Config", num_embeddings=vocab, embedding_dim=hidden, param_init=init
        ),
        norm=call("RMSNorm.Config", normalized_shape=hidden),
        lm_head=call(
            "Linear.Config", in_features=hidden, out_features=vocab, param_init=Code("INIT")
        ),
        layers=Code(f"[layer(index) for index in range({config.num_layers})]"),
    )
    spec = call(
        "ModelSpec",
        name=family,
        flavor="planned",
        model=Code("model"),
        parallelize_fn=Code(parallelize),
        pipelining_fn=Code("pipeline_llm"),
        post_optimizer_build_fn=Code(
            "register_moe_load_balancing_hook" if config.experts is not None else "None"
        ),
        state_dict_adapter=Code(f"{prefix}StateDictAdapter" if config.kind in ADAPTED else "None"),
    )
    body = f'''"""Build the configuration of the planned model."""
model = {model}
for _, norm, _, _ in model.traverse(RMSNorm.Config):
    norm.eps = {config.norm_epsilon!r}
{_conversion(own, has_experts=config.experts is not None)}return {spec}
'''
    return "def model_spec() -> ModelSpec:\n" + textwrap.indent(body, "    ")


def _conversion(own: Configuration, *, has_experts: bool) -> str:
    """Write the conversion of products to fp8, where the configuration has it."""
    if own.precision != "fp8":
        return ""
    linear = call(
        "Float8LinearConverter.Config",
        filter_fqns=["lm_head", "router.gate"],
        model_compile_enabled=own.compiled,
    )
    experts = call("Float8GroupedExpertsConverter.Config", model_compile_enabled=own.compiled)
    converters = [linear, *([experts] if has_experts else [])]
    listed = "".join(textwrap.indent(f"{each},\n", "    ") for each in converters)
    return f"for converter in (\n{listed}):\n    model = converter.build().convert(model)\n"


def _unlike(config: ModelConfig, own: Configuration, family: str) -> Iterator[Deviation]:
    scalings = ("llama3", "yarn") if family in ("deepseek_v3", "gpt_oss") else ("llama3",)
    found = {
        f"attention over a window of {config.window} positions": config.window is not None
        and family != "gpt_oss",
        "dropout": bool(config.attention_dropout or config.hidden_dropout),
    }
    texts = [*(text for text, holds in found.items() if holds), *unlike_llama(config, scalings)]
    for text in texts:
        if not (family == "gpt_oss" and text.startswith("biases")):
            yield Deviation(f"the model has {text}", f"torchtitan's {family} has not")
    if config.is_tied and own.pp > 1:
        yield Deviation(
            "one weight for embeddings and output", "two: it ties none beside a pipeline"
        )
    if config.experts is not None and own.precision == "fp32":
        yield Deviation("experts that compute in fp32", "experts that compute in bf16")
    yarn = config.yarn
    if config.latent is not None and yarn is not None and yarn.mscale != yarn.mscale_all_dim:
        yield Deviation("rotary positions scaled by yarn's mscale", "by mscale_all_dim alone")


def _refusals(config: ModelConfig, own: Configuration) -> Iterator[str]:
    """Yield notes on limits of torchtitan that the model does not meet."""
    for name, count in (("heads", config.num_heads), ("key heads", config.num_kv_heads)):
        if config.latent is None and count % own.tp:
            yield f"torchtitan stops: {count} {name} are not divisible by tp={own.tp}"
    if config.experts is not None and config.experts.count % own.ep:
        yield f"torchtitan stops: {config.experts.count} experts are not divisible by ep={own.ep}"
    if config.kind not in ADAPTED:
        yield f"torchtitan converts no checkpoints of {config.kind}: it starts from new weights"
