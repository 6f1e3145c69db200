"""Megatron-LM's arguments: read against its names, and by its own parser where it is there."""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from exported_plans import BATCH, CASES, NUM_DEVICES, case, configured, plans, written

from autoparallel.systems.megatron import layout_text, to_supported

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
)
INTEGERS = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
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
)
FLOATS = (
    "norm-epsilon",
    "attention-dropout",
    "hidden-dropout",
    "sgd-momentum",
    "optimizer-offload-fraction",
    "rope-scaling-factor",
)
CHOICES = {
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "recompute-modules": ("core_attn", "layernorm", "mlp", "moe", "moe_act"),
    "fp8-format": ("e4m3", "hybrid"),
    "optimizer": ("adam", "sgd"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "none"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "pipeline-model-parallel-layout": None,
}
"""Arguments of Megatron-LM core_v0.19.0, of those that may be written, with some of their choices.
They were written by hand from ``megatron/training/arguments.py``."""


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
        ("cp", ["--context-parallel-size=4"], []),
        ("some layers", ["--recompute-num-layers=4", "--recompute-method=block"], []),
        ("offload", ["--optimizer-cpu-offload"], []),
        ("half gradients", ["--grad-reduce-in-bf16"], []),
    ],
)
def test_arguments(name: str, wanted: list[str], unwanted: list[str], tmp_path: Path) -> None:
    found = lines(name, tmp_path)
    assert set(wanted) <= set(found)
    assert not set(unwanted) & {line.partition("=")[0] for line in found}


@pytest.mark.usefixtures("unpriced")
def test_the_sizes_of_the_model_are_those_of_its_configuration(tmp_path: Path) -> None:
    llama = parser().parse_args(lines("fsdp", tmp_path / "llama", with_model=True))
    assert (llama.num_layers, llama.hidden_size, llama.ffn_hidden_size) == (8, 64, 128)
    assert (llama.num_attention_heads, llama.num_query_groups, llama.kv_channels) == (8, 4, 8)
    assert (llama.vocab_size, llama.normalization, llama.swiglu) == (256, "RMSNorm", True)
    assert llama.untie_embeddings_and_output_weights
    mixtral = parser().parse_args(lines("experts", tmp_path / "mixtral", with_model=True))
    assert (mixtral.num_experts, mixtral.moe_router_topk) == (4, 2)


@pytest.mark.usefixtures("unpriced")
@pytest.mark.parametrize(
    ("kind", "is_written", "note"),
    [
        ("linear", False, "rotary positions scaled by linear"),
        ("llama3", True, "low and high factors of 1 and 2 from 4096 positions"),
    ],
)
def test_positions_that_megatron_scales_otherwise_are_said(
    kind: str, is_written: bool, note: str, tmp_path: Path
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
    model = replace(plans().plan.model, target=f"hf:{tmp_path / 'llama'}")
    wrote = written(replace(case("fsdp"), model=model), "megatron", tmp_path)
    found = (tmp_path / "out" / "args.txt").read_text()
    assert ("--use-rope-scaling" in found) == is_written
    assert any(note in each for each in wrote.facts["notes"])


def test_a_schedule_in_a_v_becomes_interleaved_or_1f1b() -> None:
    """The interleaved schedule takes micro-batches in groups of the pipeline's ranks."""
    own = configured(dp=4, pp=2, schedule="zbv", num_chunks=2, layers=(1, 2, 3, 2))
    assert (to_supported(own).schedule, to_supported(own).layers) == ("interleaved", (1, 2, 3, 2))
    odd = replace(own, num_microbatches=3)
    assert (to_supported(odd).schedule, to_supported(odd).layers) == ("1f1b", (3, 5))
    assert to_supported(odd).num_chunks == 1


def test_a_layout_counts_the_layers_of_each_stage() -> None:
    assert layout_text((2, 1, 3)) == "Ett|t|tttL"


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
