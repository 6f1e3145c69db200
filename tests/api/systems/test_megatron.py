"""Megatron-LM's arguments: read against its names, and by its own parser where it is there."""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from exported_plans import BATCH, CASES, NUM_DEVICES, case, configured, plans, written

from autoparallel.planner.graph.layout import HALO, OF_GROUPS, RING
from autoparallel.planner.plan import Plan
from autoparallel.systems.megatron import (
    DENSE,
    MODELS,
    layout_text,
    pattern_text,
    to_supported,
    write,
)
from autoparallel.systems.model_config import read_config
from autoparallel.systems.system import Files, WriterInput

ZOO = Path(__file__).resolve().parents[3] / "tests" / "zoo"

FLAGS = (
    "sequence-parallel",
    "overlap-grad-reduce",
    "use-distributed-optimizer",
    "overlap-param-gather",
    "use-megatron-fsdp",
    "no-gradient-accumulation-fusion",
    "optimizer-cpu-offload",
    "use-precision-aware-optimizer",
    "bf16",
    "fp16",
    "grad-reduce-in-bf16",
    "group-query-attention",
    "swiglu",
    "disable-bias-linear",
    "use-rope-scaling",
    "add-qkv-bias",
    "untie-embeddings-and-output-weights",
    "moe-grouped-gemm",
    "moe-router-pre-softmax",
    "moe-router-enable-expert-bias",
    "moe-apply-probs-on-input",
    "moe-shared-expert-gate",
    "multi-latent-attention",
    "qk-layernorm",
    "qk-l2-norm",
    "quick-geglu",
    "rotary-interleaved",
    "no-rope-fusion",
    "no-yarn-correction-range-round-to-int",
)
INTEGERS = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "num-distributed-optimizer-instances",
    "micro-batch-size",
    "global-batch-size",
    "seq-length",
    "max-position-embeddings",
    "recompute-num-layers",
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "kv-channels",
    "vocab-size",
    "num-query-groups",
    "rotary-base",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
    "moe-router-num-groups",
    "moe-router-group-topk",
    "q-lora-rank",
    "kv-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
    "yarn-original-max-position-embeddings",
)
FLOATS = (
    "norm-epsilon",
    "attention-dropout",
    "hidden-dropout",
    "sgd-momentum",
    "optimizer-offload-fraction",
    "rope-scaling-factor",
    "moe-router-topk-scaling-factor",
    "glu-linear-offset",
    "activation-func-clamp-value",
    "rotary-percent",
    "rotary-scaling-factor",
    "mscale",
    "mscale-all-dim",
    "yarn-beta-fast",
    "yarn-beta-slow",
)
CHOICES = {
    "cp-comm-type": ("p2p", "a2a", "all_gather", "a2a+p2p"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer-dp-sharding-strategy": ("no_shard", "optim"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "recompute-modules": ("core_attn", "layernorm", "mlp", "moe", "moe_act"),
    "fp8-format": ("e4m3", "hybrid"),
    "optimizer": ("adam", "sgd"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "none"),
    "rope-type": ("rope", "yarn"),
    "softmax-type": ("vanilla", "off-by-one", "learnable"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-router-dtype": ("fp32", "fp64"),
    "moe-layer-freq": None,
    "no-rope-freq": None,
    "window-size": None,
    "window-attn-skip-freq": None,
    "pipeline-model-parallel-layout": None,
}
"""Arguments of Megatron-LM's main branch (commit d98e8a6), of those that may be written, with some
of their choices. Every name was found among the options of its parser."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in FLAGS:
        found.add_argument(f"--{name}", action="store_true")
    for kind, names in ((int, INTEGERS), (float, FLOATS)):
        for name in names:
            found.add_argument(f"--{name}", type=kind)
    for name, choices in CHOICES.items():
        found.add_argument(f"--{name}", choices=choices)
    return found


def lines(name: str, folder: Path, *, with_model: bool = False) -> list[str]:
    plan = case(name)
    if with_model:
        model = replace(plan.model, target=plans(CASES[name][0]).plan.model.target)
        plan = replace(plan, model=model)
    written(plan, "megatron", folder)
    return (folder / "out" / "args.txt").read_text().splitlines()


@pytest.mark.parametrize("name", CASES)
def test_the_arguments_are_megatrons_and_degrees_multiply(name: str, tmp_path: Path) -> None:
    own = parser().parse_args(lines(name, tmp_path))
    model = (
        own.tensor_model_parallel_size
        * own.pipeline_model_parallel_size
        * own.context_parallel_size
    )
    dp = NUM_DEVICES // model
    assert dp * model == NUM_DEVICES
    assert own.global_batch_size == BATCH
    assert BATCH % (own.micro_batch_size * dp) == 0
    if own.expert_model_parallel_size:
        assert dp * own.context_parallel_size % own.expert_model_parallel_size == 0
    if layout := own.pipeline_model_parallel_layout:
        stages = layout.removeprefix("E").removesuffix("L").split("|")
        assert len(stages) % own.pipeline_model_parallel_size == 0
        assert sum(map(len, stages)) == 8
        chunks = len(stages) // own.pipeline_model_parallel_size
        microbatches = BATCH // (own.micro_batch_size * dp)
        assert chunks == 1 or microbatches % own.pipeline_model_parallel_size == 0


def test_megatrons_own_parser_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    monkeypatch.setenv("WORLD_SIZE", str(NUM_DEVICES))
    for number, name in enumerate(CASES):
        words = lines(name, tmp_path / str(number))
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
        read = arguments.parse_args()
        assert read.global_batch_size == BATCH


@pytest.mark.parametrize(
    ("name", "wanted", "unwanted"),
    [
        ("one dp axis", ["--bf16"], ["--use-distributed-optimizer"]),
        ("zero 1", ["--use-distributed-optimizer", "--overlap-param-gather"], []),
        (
            "fsdp",
            [
                "--data-parallel-sharding-strategy=optim_grads_params",
                "--recompute-num-layers=8",
                "--recompute-granularity=full",
            ],
            [],
        ),
        ("selective", ["--data-parallel-sharding-strategy=optim_grads"], []),
        ("tp", ["--tensor-model-parallel-size=8"], ["--sequence-parallel"]),
        ("sp", ["--tensor-model-parallel-size=4", "--sequence-parallel"], []),
        ("uneven stages", ["--pipeline-model-parallel-layout=Ettt|tt|tt|tL"], []),
        ("interleaved", ["--pipeline-model-parallel-layout=Ett|tt|tt|ttL"], []),
        ("experts", ["--expert-model-parallel-size=4"], []),
        ("cp", ["--context-parallel-size=4", "--cp-comm-type=all_gather"], []),
        ("some layers", ["--recompute-num-layers=4", "--recompute-method=block"], []),
        ("offload", ["--optimizer-cpu-offload"], []),
        ("half gradients", ["--grad-reduce-in-bf16"], []),
        (
            "hsdp",
            ["--num-distributed-optimizer-instances=2", "--outer-dp-sharding-strategy=no_shard"],
            [],
        ),
        (
            "zero 1 within groups",
            ["--num-distributed-optimizer-instances=2", "--use-distributed-optimizer"],
            ["--outer-dp-sharding-strategy=no_shard"],
        ),
    ],
)
def test_arguments(name: str, wanted: list[str], unwanted: list[str], tmp_path: Path) -> None:
    found = lines(name, tmp_path)
    assert set(wanted) <= set(found)
    assert not set(unwanted) & {line.partition("=")[0] for line in found}


@pytest.mark.usefixtures("unpriced")
@pytest.mark.parametrize(
    ("label", "kind", "here"),
    [
        (RING, "p2p", ""),
        ("b1", "a2a", ""),
        (HALO, "all_gather", "keys of its windows alone"),
        (OF_GROUPS, "p2p", "attention by heads, of which keys have fewer than ranks"),
    ],
)
def test_the_way_of_attention_is_that_of_the_plan(
    label: str, kind: str, here: str, tmp_path: Path
) -> None:
    plan = with_attention(case("cp"), label)
    report = " ".join(written(plan, "megatron", tmp_path).report.split())
    assert f"--cp-comm-type={kind}" in (tmp_path / "out" / "args.txt").read_text().splitlines()
    assert here in report


@pytest.mark.usefixtures("unpriced")
@pytest.mark.parametrize("label", [RING, HALO, "b1"])
def test_torchtitan_gathers_keys_where_the_plan_does_not(label: str, tmp_path: Path) -> None:
    report = written(with_attention(case("cp"), label), "torchtitan", tmp_path).report
    assert "keys and values gathered" in " ".join(report.split())


def with_attention(plan: Plan, label: str) -> Plan:
    """The plan with another way of attention on its axis "cp"."""
    (stage,) = plan.stages
    cp = stage.mesh.axes.index("cp")
    layouts = {
        name: replace(each, labels=(*each.labels[:cp], label, *each.labels[cp + 1 :]))
        if name.startswith("scaled_dot_product_attention")
        else each
        for name, each in stage.layouts.items()
    }
    return replace(plan, stages=(replace(stage, layouts=layouts),))


@pytest.mark.usefixtures("unpriced")
def test_the_sizes_of_the_model_are_those_of_its_configuration(tmp_path: Path) -> None:
    llama = parser().parse_args(lines("fsdp", tmp_path / "llama", with_model=True))
    assert (llama.num_layers, llama.hidden_size, llama.ffn_hidden_size) == (8, 64, 128)
    assert (llama.num_attention_heads, llama.num_query_groups, llama.kv_channels) == (8, 4, 8)
    assert (llama.vocab_size, llama.normalization, llama.swiglu) == (256, "RMSNorm", True)
    assert llama.untie_embeddings_and_output_weights
    mixtral = parser().parse_args(lines("experts", tmp_path / "mixtral", with_model=True))
    assert (mixtral.num_experts, mixtral.moe_router_topk) == (4, 2)


def files_of(kind: str, **choices: Any) -> Files:
    """Files of a configuration with a model of the zoo, without a plan of it."""
    plan = case("one dp axis")
    target = kind if kind.startswith("/") else str(ZOO / kind)
    plan = replace(plan, model=replace(plan.model, target=f"hf:{target}"))
    own = to_supported(configured(**choices))
    return write(WriterInput(plan, own, read_config(plan)[0], Path("out")))


def arguments_of(kind: str, **choices: Any) -> argparse.Namespace:
    return parser().parse_args(files_of(kind, **choices).texts["args.txt"].splitlines())


@pytest.mark.parametrize("kind", MODELS)
def test_arguments_of_models_are_megatrons(kind: str) -> None:
    found = arguments_of(kind, dp=8, ep=1 if kind in DENSE else 2)
    assert (found.num_experts is None) == (kind in DENSE)
    if kind in DENSE:
        assert found.expert_model_parallel_size is None
    else:
        assert found.expert_model_parallel_size == 2


def test_deepseek_has_latent_attention_and_a_router_with_groups() -> None:
    found = arguments_of("deepseek_v3", dp=8, ep=8)
    latent = (found.q_lora_rank, found.kv_lora_rank, found.qk_head_dim, found.qk_pos_emb_head_dim)
    assert found.multi_latent_attention
    assert (*latent, found.v_head_dim) == (16, 16, 8, 8, 8)
    assert (found.num_query_groups, found.rope_type, found.no_rope_fusion) == (None, "rope", True)
    assert (found.moe_layer_freq, found.moe_ffn_hidden_size) == ("([0]*1+[1]*2)", 32)
    assert found.moe_shared_expert_intermediate_size == 32
    assert (found.moe_router_score_function, found.moe_router_dtype) == ("sigmoid", "fp32")
    assert found.moe_router_enable_expert_bias
    assert (found.moe_router_num_groups, found.moe_router_group_topk) == (4, 2)
    assert found.moe_router_topk_scaling_factor == 2.5


def test_gpt_oss_has_sinks_windows_biases_and_a_bounded_activation() -> None:
    found = arguments_of("gpt_oss", dp=8, ep=4)
    assert found.softmax_type == "learnable"
    assert (found.window_size, found.window_attn_skip_freq) == ("7,0", "([1]*1+[0]*1)")
    assert found.quick_geglu
    assert not found.swiglu
    assert not found.disable_bias_linear
    assert (found.glu_linear_offset, found.activation_func_clamp_value) == (1.0, 7.0)
    assert (found.position_embedding_type, found.rotary_scaling_factor) == ("yarn", 32.0)
    assert found.no_yarn_correction_range_round_to_int


def test_softmax_routers_choose_before_or_after_the_softmax() -> None:
    """Megatron-LM's softmax over the chosen experts is one over all, divided by the chosen sum."""
    assert not arguments_of("mixtral", dp=8, ep=4).moe_router_pre_softmax
    assert arguments_of("qwen3_moe", dp=8, ep=4).moe_router_pre_softmax  # norm_topk_prob=False
    assert arguments_of("qwen2_moe", dp=8, ep=4).moe_shared_expert_gate


def test_llama_4_weights_the_inputs_of_experts() -> None:
    found = arguments_of("llama4_text", dp=8, ep=2)
    assert found.moe_apply_probs_on_input
    assert found.qk_l2_norm
    assert (found.moe_router_topk, found.moe_router_score_function) == (1, "sigmoid")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("olmoe", "a norm over all heads"),
        ("granitemoe", "constant factors"),
        ("llama4_text", "attention within chunks of 32 positions"),
        ("deepseek_v3", "groups of experts scored by their two best"),
    ],
)
def test_properties_of_models_without_an_argument_are_said(kind: str, text: str) -> None:
    assert any(text in each.plan for each in files_of(kind, dp=8, ep=2).lost)


@pytest.mark.parametrize(
    ("choices", "ep", "etp", "sp"),
    [
        ({"dp": 8, "ep": 4}, 4, None, False),
        ({"dp": 4, "tp": 2, "ep": 8, "etp": 1}, 8, 1, True),
        ({"dp": 2, "cp": 2, "tp": 2, "ep": 8, "etp": 1}, 8, 1, True),
        ({"dp": 4, "tp": 2, "ep": 4}, 4, 2, True),
        ({"dp": 2, "cp": 4, "ep": 8}, 8, None, False),
        ({"dp": 4, "tp": 2, "sequence_parallel": False}, None, None, True),
    ],
)
def test_experts_are_spread_over_tensor_ranks_or_split_over_them(
    choices: dict[str, Any], ep: int | None, etp: int | None, sp: bool
) -> None:
    """Megatron-LM refuses experts beside tensor parallelism without sequence parallelism."""
    found = arguments_of("deepseek_v3", **choices)
    assert found.expert_model_parallel_size == ep
    assert found.expert_tensor_parallel_size == etp
    assert found.sequence_parallel == sp


@pytest.mark.parametrize(("tp", "ep", "spread"), [(2, 2, 4), (2, 1, 2), (2, 4, 4)])
def test_experts_with_biases_are_whole(tp: int, ep: int, spread: int) -> None:
    """Megatron-LM has biases of experts only with an expert tensor parallel size of 1."""
    found = arguments_of("gpt_oss", dp=8 // tp, tp=tp, ep=ep)
    assert found.expert_tensor_parallel_size == 1
    assert found.expert_model_parallel_size == spread


def test_experts_on_other_ranks_than_the_plans_are_said() -> None:
    """Its neighbouring ranks are those of context parallelism."""
    planned = replace(case("cp"), model=replace(case("cp").model, target=f"hf:{ZOO / 'mixtral'}"))
    own = to_supported(configured(dp=2, cp=4, ep=2))
    lost = write(WriterInput(planned, own, read_config(planned)[0], Path("out"))).lost
    assert any(each.here.endswith("which are of context parallelism") for each in lost)


@pytest.mark.parametrize(
    ("kind", "is_written", "difference"),
    [
        ("linear", False, "rotary positions scaled by linear"),
        ("llama3", True, "low and high factors of 1 and 2 from 4096 positions"),
    ],
)
def test_positions_that_megatron_scales_otherwise_are_said(
    kind: str, is_written: bool, difference: str, tmp_path: Path
) -> None:
    scaling = {
        "rope_type": kind,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 4096,
    }
    config = transformers.LlamaConfig(rope_scaling=scaling, max_position_embeddings=8192)
    config.save_pretrained(tmp_path / "llama")
    files = files_of(str(tmp_path / "llama"), dp=8)
    assert ("--use-rope-scaling" in files.texts["args.txt"]) == is_written
    assert any(difference in each.plan for each in files.lost)


def test_a_schedule_in_a_v_becomes_interleaved_or_1f1b() -> None:
    """The interleaved schedule takes micro-batches in groups of the pipeline's ranks."""
    own = configured(dp=4, pp=2, schedule="zbv", num_chunks=2, layers=(1, 2, 3, 2))
    assert (to_supported(own).schedule, to_supported(own).layers) == ("interleaved", (1, 2, 3, 2))
    odd = replace(own, num_microbatches=3)
    assert (to_supported(odd).schedule, to_supported(odd).layers) == ("1f1b", (3, 5))
    assert to_supported(odd).num_chunks == 1


def test_a_layout_counts_the_layers_of_each_stage() -> None:
    assert layout_text((2, 1, 3)) == "Ett|t|tttL"


def test_a_pattern_is_a_python_expression_of_the_layers() -> None:
    for layers in ([0] * 3 + [1] * 58, [1, 0] * 12, [0, 1, 1, 0], [1, 1]):
        text = pattern_text([bool(each) for each in layers])
        assert eval(text) == layers


def test_the_script_passes_on_each_argument(tmp_path: Path) -> None:
    """Under a torchrun that prints what it is given."""
    expected = lines("uneven stages", tmp_path)
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "out" / "train.sh"), "--lr", "1e-4"],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", "MEGATRON": "/megatron"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "--nproc-per-node",
        "8",
        "/megatron/pretrain_gpt.py",
        *expected,
        "--lr",
        "1e-4",
    ]
