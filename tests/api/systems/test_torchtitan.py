"""torchtitan's configurations: read as Python against its names, by torchtitan itself where it is
installed, and schedules by torch's pipelines."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from exported_plans import BATCH, CASES, NUM_DEVICES, SEQ, case, configured, plans, written
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _simulate_comms_compute,
    _validate_schedule,
)

from autoparallel.planner.configured.configuration import Configuration
from autoparallel.systems.model_config import read_config
from autoparallel.systems.system import Files, WriterInput
from autoparallel.systems.torchtitan import BY_TABLE, schedule_table, to_supported, write

BLOCK = "attention attention_norm ffn_norm feed_forward moe"
MODEL = "dim vocab_size enable_weight_tying tok_embeddings norm lm_head layers"
LINEAR = "in_features out_features bias param_init"
ROPE = (
    "dim max_context_length theta scaling scaling_factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings rope_factor beta_fast beta_slow original_seq_len truncate"
)
KEYWORDS = {
    "Attention.Config": "dim n_heads n_kv_heads head_dim qkv_linear wo inner_attention "
    "sliding_window_size param_init rope",
    "CompileConfig": "enable components",
    "ComplexRoPE.Config": ROPE,
    "ConcatThenSplitPackingConfig": "dataset",
    "CosSinRoPE.Config": ROPE,
    "CrossEntropyLoss.Config": "global_vocab_size",
    "DeepSeekV3Model.Config": MODEL,
    "DeepSeekV3TransformerBlock.Config": BLOCK,
    "Embedding.Config": "num_embeddings embedding_dim param_init",
    "Float8GroupedExpertsConverter.Config": "model_compile_enabled",
    "Float8LinearConverter.Config": "filter_fqns model_compile_enabled",
    "FusedQKVLinear.Config": "head_dim n_heads n_kv_heads wqkv",
    "GptOssGroupedExperts.Config": "dim hidden_dim num_experts swiglu_limit param_init",
    "GptOssMoE.Config": "num_experts router routed_experts load_balance_coeff",
    "GptOssModel.Config": MODEL,
    "GptOssTransformerBlock.Config": BLOCK,
    "GrainDataLoader.Config": "dataset",
    "Linear.Config": LINEAR,
    "Llama3Model.Config": MODEL,
    "Llama3TransformerBlock.Config": BLOCK,
    "ModelSpec": "name flavor model parallelize_fn pipelining_fn post_optimizer_build_fn "
    "state_dict_adapter",
    "OptimizersContainer.Config": "param_groups",
    "ParallelismConfig": "data_parallel_replicate_degree data_parallel_shard_degree "
    "fsdp_reshard_after_forward tensor_parallel_degree enable_sequence_parallel "
    "context_parallel_degree expert_parallel_degree pipeline_parallel_degree "
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv num_pp_microbatches "
    "module_fqns_per_model_part",
    "ParamGroupConfig": "pattern optimizer_name optimizer_kwargs",
    "Qwen3Model.Config": MODEL,
    "Qwen3TransformerBlock.Config": BLOCK,
    "RMSNorm.Config": "normalized_shape",
    "RoutedExperts.Config": "inner_experts token_dispatcher",
    "ScaledBiasRowwiseLinear.Config": LINEAR,
    "SomeLayers.Config": "layers",
    "Trainer.Config": "model_spec loss dataloader optimizer training parallelism "
    "activation_checkpoint compile",
    "TrainingConfig": "max_context_length num_tokens_per_microbatch_per_dp_rank "
    "num_tokens_per_train_step mixed_precision_param mixed_precision_reduce enable_cpu_offload "
    "disable_cuda_graphs",
    "dataclass": "kw_only slots",
    "make_ffn_config": "dim hidden_dim w1_param_init w2w3_param_init",
    "make_gqa_config": "dim n_heads n_kv_heads head_dim wqkv_param_init wo_param_init "
    "inner_attention fuse_qkv rope qk_norm",
    "make_mla_attention_config": "layer_id dim n_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim mscale attn_backend linear_init norm_init depth_init rope",
    "make_moe_config": "num_experts router routed_experts shared_experts load_balance_coeff",
    "make_routed_experts_config": "dim hidden_dim num_experts top_k param_init comm_backend",
    "make_router_config": "dim num_experts gate_param_init top_k score_func route_norm "
    "route_scale num_expert_groups num_limited_groups bias",
    "make_token_dispatcher_config": "num_experts top_k comm_backend hidden_dim",
    "partial": "std",
}
"""Keywords of torchtitan's classes and functions, of those that may be written; they were compared
with the signatures in its main branch (commit b5bcd76)."""

FILE = "planned_config.py"
ZOO = Path(__file__).resolve().parents[3] / "tests" / "zoo"


def calls_of(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def settings(text: str, name: str) -> dict[str, Any]:
    """The keyword arguments of the first call of ``name``: values, or else their source."""
    found = next(node for node in calls_of(text) if ast.unparse(node.func) == name)
    return {str(each.arg): _value(each.value) for each in found.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _value(node.left) * _value(node.right)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def text_of(name: str, folder: Path) -> str:
    written(case(name), "torchtitan", folder)
    return (folder / "out" / FILE).read_text()


def files_of(kind: str, **choices: Any) -> Files:
    """Files of a configuration with a model of the zoo, without a plan of it."""
    plan = case("one dp axis")
    plan = replace(plan, model=replace(plan.model, target=f"hf:{ZOO / kind}"))
    own: Configuration = to_supported(configured(**choices))
    return write(WriterInput(plan, own, read_config(plan)[0], Path("out")))


def check_names(text: str) -> None:
    for node in calls_of(text):
        unknown = {each.arg for each in node.keywords} - set(
            KEYWORDS.get(ast.unparse(node.func), "").split()
        )
        assert not unknown, (ast.unparse(node.func), unknown)


KINDS = ("one dp axis", "3d", "cp", "zbv", "uneven stages")
"""With every degree of torchtitan's but that of experts."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in CASES],
)
def test_names_are_those_of_torchtitan_and_degrees_multiply(name: str, tmp_path: Path) -> None:
    text = text_of(name, tmp_path)
    check_names(text)
    own, training = settings(text, "ParallelismConfig"), settings(text, "TrainingConfig")
    dp = own["data_parallel_replicate_degree"] * own["data_parallel_shard_degree"]
    model = own["tensor_parallel_degree"] * own["context_parallel_degree"]
    pp = own["pipeline_parallel_degree"]
    assert dp * model * pp == NUM_DEVICES
    sharing = own["data_parallel_shard_degree"] * model
    assert sharing % own["expert_parallel_degree"] == 0
    assert training["num_tokens_per_train_step"] == BATCH * SEQ
    assert training["max_context_length"] == SEQ
    # A pipeline takes its micro-batches at once, else each is a step of accumulation.
    tokens = training["num_tokens_per_microbatch_per_dp_rank"] * dp
    counts = BATCH * SEQ // (tokens * own.get("num_pp_microbatches", 1))
    assert counts * tokens * own.get("num_pp_microbatches", 1) == BATCH * SEQ
    if pp > 1:
        assert counts == 1
        parts = own["module_fqns_per_model_part"]
        assert len(parts) % pp == 0
        layers = [f"layers.{index}" for index in range(8)]
        names = [name for part in parts for name in part]
        assert names == ["tok_embeddings", *layers, "norm", "lm_head"]


def read_by_torchtitan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torchtitan makes of the file in ``folder``: a configuration with its model updated."""
    manager = pytest.importorskip("torchtitan.config.manager", exc_type=ImportError)
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(FILE.removesuffix(".py"), None)
    words = ["--module", FILE.removesuffix(".py"), "--config", "planned"]
    found = manager.ConfigManager().parse_args(words)
    dims.ParallelDims.from_config(found.parallelism, NUM_DEVICES)
    found.model_spec.model.update_from_config(config=found)
    return found


MODELS = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Members of the zoo that torchtitan has the modules of."""


@pytest.mark.parametrize("kind", MODELS)
def test_torchtitan_builds_the_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many parameters as transformers."""
    torch = pytest.importorskip("torch")
    degrees = {"dp": 4, "tp": 2} | ({"ep": 4} if kind not in MODELS[:3] else {})
    files = files_of(kind, **degrees)
    for name, text in files.texts.items():
        (tmp_path / name).write_text(text)
    found = read_by_torchtitan(tmp_path, monkeypatch)
    config = transformers.AutoConfig.from_pretrained(ZOO / kind)
    with torch.device("meta"):
        built = found.model_spec.model.build()
        expected = transformers.AutoModelForCausalLM.from_config(config)
    counts = [sum(each.numel() for each in model.parameters()) for model in (built, expected)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", MODELS)
def test_names_of_models_are_those_of_torchtitan(kind: str) -> None:
    text = files_of(kind, dp=8, ep=1 if kind in MODELS[:3] else 4, precision="fp8").texts[FILE]
    check_names(text)
    compile(text, FILE, "exec")


def test_experts_are_routed_as_the_model_does() -> None:
    text = files_of("deepseek_v3", dp=8, ep=8, zero=3).texts[FILE]
    assert "is_dense = index in (0,)" in text
    assert settings(text, "make_router_config") == {
        "dim": 32,
        "num_experts": 8,
        "gate_param_init": "INIT",
        "top_k": 2,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
        "num_expert_groups": 4,
        "num_limited_groups": 2,
        "bias": False,
    }
    assert settings(text, "make_mla_attention_config")["q_lora_rank"] == 16
    mixtral = files_of("mixtral", dp=8, ep=4).texts[FILE]
    assert settings(mixtral, "make_router_config")["score_func"] == "softmax"
    assert settings(mixtral, "make_router_config")["route_norm"] is True
    assert settings(mixtral, "make_moe_config")["load_balance_coeff"] is None
    gpt_oss = files_of("gpt_oss", dp=8, ep=4).texts[FILE]
    assert settings(gpt_oss, "Attention.Config")["sliding_window_size"] == (
        "8 if index in (0,) else None"
    )
    assert settings(gpt_oss, "CosSinRoPE.Config")["rope_factor"] == 32.0


@pytest.mark.parametrize(
    ("choices", "sharing", "ep"),
    [
        ({"dp": 8, "ep": 4}, 8, 4),
        ({"dp": 4, "tp": 2, "ep": 4, "etp": 1}, 8, 4),
        ({"dp": 2, "cp": 2, "tp": 2, "ep": 8, "etp": 1}, 8, 8),
        ({"dp": 2, "tp": 2, "pp": 2, "ep": 4, "etp": 1}, 4, 4),
    ],
)
def test_experts_are_spread_over_ranks_that_shard(
    choices: dict[str, Any], sharing: int, ep: int
) -> None:
    """Experts are spread over the ranks that shard, never over ranks that replicate, so torchtitan
    shards other weights too where the plan has ZeRO 0."""
    own = settings(files_of("deepseek_v3", **choices).texts[FILE], "ParallelismConfig")
    names = ("data_parallel_shard", "context_parallel", "tensor_parallel")
    product = 1
    for name in names:
        product *= own[f"{name}_degree"]
    assert (product, own["expert_parallel_degree"]) == (sharing, ep)
    assert own["data_parallel_replicate_degree"] == 1


@pytest.mark.parametrize("kind", ["olmoe", "granitemoe", "llama4_text", "qwen2_moe", "glm4_moe"])
def test_a_model_that_torchtitan_lacks_stops_it(kind: str) -> None:
    files = files_of(kind, dp=8, ep=2)
    text = files.texts[FILE]
    assert f'raise NotImplementedError("torchtitan has no {kind}' in text
    check_names(text)
    assert any(each.plan == f"the model, {kind}" for each in files.lost)


def test_limits_of_torchtitan_are_said() -> None:
    """Its attention splits key heads, its experts are divided evenly."""
    notes = files_of("mixtral", dp=2, tp=4, ep=8).notes
    assert "torchtitan stops: 2 key heads are not divisible by tp=4" in notes
    assert "torchtitan stops: 4 experts are not divisible by ep=8" in notes


def test_unequal_stages_are_kept(tmp_path: Path) -> None:
    text = text_of("uneven stages", tmp_path)
    parts = settings(text, "ParallelismConfig")["module_fqns_per_model_part"]
    counts = [sum(name.startswith("layers.") for name in part) for part in parts]
    assert counts == [3, 2, 2, 1]


@pytest.mark.parametrize("schedule", BY_TABLE)
def test_torchs_pipelines_run_a_schedule_that_is_written_as_a_table(schedule: str) -> None:
    """torch lowers the table to sends and receives and executes it in a dry run."""
    own = configured(dp=2, pp=4, schedule=schedule)
    rows = schedule_table(own).splitlines()
    orders = {
        rank: [_Action.from_str(text) for text in row.split(",")] for rank, row in enumerate(rows)
    }
    ranks = _validate_schedule(orders, 4, 4, own.num_microbatches)
    assert ranks == {stage: stage for stage in range(4)}
    lowered = _add_send_recv(orders, lambda stage: stage, 4)
    _simulate_comms_compute(lowered, lambda stage: stage, 4)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("one dp axis", None),
        ("fsdp", "FullAC.Config()"),
        ("some layers", "SomeLayers.Config(layers=(0, 1, 2, 3))"),
        ("selective", "FullAC.Config()"),  # it is not priced, so it may need the least memory
    ],
)
def test_recomputation(name: str, policy: str | None, tmp_path: Path) -> None:
    text = text_of(name, tmp_path)
    assert settings(text, "Trainer.Config")["activation_checkpoint"] == policy
    assert ("class SomeLayers(FullAC)" in text) == (name == "some layers")


@pytest.mark.parametrize(("name", "zero"), [("zero 1", 2), ("1f1b", 1), ("fsdp", 3)])
def test_fsdp_sums_gradients_once_a_step_beside_a_pipeline(
    name: str, zero: int, tmp_path: Path
) -> None:
    """torch's pipelines sum gradients with the last micro-batch, as ZeRO 1 does."""
    assert written(case(name), "torchtitan", tmp_path).facts["zero"] == zero


def test_one_weight_for_embeddings_and_output_is_two_beside_a_pipeline(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**LLAMA_8B, "tie_word_embeddings": True})
    config.save_pretrained(tmp_path / "llama")
    alone = files_of(str(tmp_path / "llama"), dp=8)
    assert settings(alone.texts[FILE], "Llama3Model.Config")["enable_weight_tying"] is True
    piped = files_of(str(tmp_path / "llama"), dp=4, pp=2)
    assert "enable_weight_tying" not in piped.texts[FILE]
    assert any(each.plan.startswith("one weight") for each in piped.lost)


@pytest.mark.usefixtures("unpriced")
def test_a_llama_comes_with_its_sizes(tmp_path: Path) -> None:
    plan = replace(case("fsdp"), model=plans().plan.model)
    wrote = written(plan, "torchtitan", tmp_path)
    text = (tmp_path / "out" / FILE).read_text()
    sizes = settings(text, "make_gqa_config")
    assert (sizes["dim"], sizes["n_heads"], sizes["n_kv_heads"]) == (64, 8, 4)
    assert settings(text, "make_ffn_config")["hidden_dim"] == 128
    assert wrote.start.startswith("PYTHONPATH=")
    assert "--module planned_config --config planned" in wrote.start


LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "scaling", "factor"),
    [
        ({"rope_scaling": LLAMA_31_ROPE}, "llama", 8.0),
        ({}, None, None),
        ({"rope_scaling": {**LLAMA_31_ROPE, "factor": 32.0}}, "llama", 32.0),
    ],
)
def test_positions_are_scaled_as_the_models_are(
    changes: dict[str, Any], scaling: str | None, factor: float | None, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**{**LLAMA_8B, **changes})
    config.save_pretrained(tmp_path / "llama")
    text = files_of(str(tmp_path / "llama"), dp=8, zero=3).texts[FILE]
    found = settings(text, "ComplexRoPE.Config")
    assert (found.get("scaling"), found.get("scaling_factor")) == (scaling, factor)
    assert (found["dim"], found["theta"]) == (128, 500000.0)


def test_a_schedule_of_one_stage_per_rank_has_its_simple_name() -> None:
    one = configured(dp=2, pp=4, schedule="interleaved")
    assert to_supported(one).schedule == "1f1b"
    assert to_supported(replace(one, schedule="bfs")).schedule == "gpipe"
    assert to_supported(replace(one, schedule="chimera")).schedule == "1f1b"
