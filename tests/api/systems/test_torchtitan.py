"""torchtitan's files: read as TOML against its names, by its own parser where it is installed, and
schedules by torch's pipelines."""

from __future__ import annotations

import tomllib
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

from autoparallel.systems.torchtitan import BY_TABLE, inner_size, schedule_table, to_supported

NAMES = {
    "job": {"description"},
    "model": {"name", "flavor", "converters"},
    "optimizer": {"name"},
    "training": {
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "enable_cpu_offload",
    },
    "parallelism": {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
        "module_fqns_per_model_part",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "compile": {"enable"},
    "experimental": {"custom_import"},
}
"""Sections and fields of ``JobConfig`` in torchtitan 0.2.2, of those that may be written."""


def toml_of(name: str, folder: Path) -> dict[str, Any]:
    written(case(name), "torchtitan", folder)
    return tomllib.loads((folder / "out" / "train.toml").read_text())


KINDS = ("one dp axis", "3d", "cp", "zbv", "uneven stages")
"""With every degree of torchtitan's but that of experts."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in CASES],
)
def test_names_are_those_of_the_job_config_and_degrees_multiply(name: str, tmp_path: Path) -> None:
    found = toml_of(name, tmp_path)
    assert all(set(values) <= NAMES[section] for section, values in found.items())
    own, training = found["parallelism"], found["training"]
    dp = own["data_parallel_replicate_degree"] * own["data_parallel_shard_degree"]
    model = own["tensor_parallel_degree"] * own["context_parallel_degree"]
    assert dp * model * own["pipeline_parallel_degree"] == NUM_DEVICES
    assert training["global_batch_size"] == BATCH
    assert training["seq_len"] == SEQ
    # An accumulated gradient is of local_batch_size samples; a pipeline takes all at once.
    accumulated, rest = divmod(BATCH, training["local_batch_size"] * dp)
    assert rest == 0
    if own["pipeline_parallel_degree"] > 1:
        assert accumulated == 1
        assert training["local_batch_size"] % own["pipeline_parallel_microbatch_size"] == 0
        parts = own["module_fqns_per_model_part"]
        assert len(parts) % own["pipeline_parallel_degree"] == 0
        layers = [f"layers.{index}" for index in range(8)]
        assert [name for part in parts for name in part] == [
            "tok_embeddings",
            *layers,
            "norm",
            "output",
        ]


@pytest.mark.parametrize("name", CASES)
def test_torchtitan_reads_it(name: str, tmp_path: Path) -> None:
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", exc_type=ImportError)
    toml_of(name, tmp_path)
    read = config.ConfigManager().parse_args(
        ["--job.config_file", str(tmp_path / "out" / "train.toml")]
    )
    own = read.parallelism
    dims.ParallelDims(
        dp_replicate=own.data_parallel_replicate_degree,
        dp_shard=own.data_parallel_shard_degree,
        cp=own.context_parallel_degree,
        tp=own.tensor_parallel_degree,
        pp=own.pipeline_parallel_degree,
        ep=own.expert_parallel_degree,
        etp=own.expert_tensor_parallel_degree,
        world_size=NUM_DEVICES,
    )


def test_unequal_stages_are_kept(tmp_path: Path) -> None:
    parts = toml_of("uneven stages", tmp_path)["parallelism"]["module_fqns_per_model_part"]
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
    ("name", "mode"),
    [
        ("one dp axis", {"mode": "none"}),
        ("fsdp", {"mode": "full"}),
        ("some layers", {"mode": "selective", "selective_ac_option": "2"}),
        ("selective", {"mode": "full"}),  # it is not priced, so it may need the least memory
    ],
)
def test_recomputation(name: str, mode: dict[str, str], tmp_path: Path) -> None:
    assert toml_of(name, tmp_path)["activation_checkpoint"] == mode


@pytest.mark.parametrize(("name", "zero"), [("zero 1", 2), ("1f1b", 1), ("fsdp", 3)])
def test_fsdp_sums_gradients_once_a_step_beside_a_pipeline(
    name: str, zero: int, tmp_path: Path
) -> None:
    """torch's pipelines sum gradients with the last micro-batch, as ZeRO 1 does."""
    assert written(case(name), "torchtitan", tmp_path).facts["zero"] == zero


def test_mixed_precision_that_torchtitan_would_leave_out_is_said(tmp_path: Path) -> None:
    """With tp alone there is no FSDP, which is what casts."""
    lost = written(case("tp"), "torchtitan", tmp_path).facts["differences"]
    assert any(each["plan"] == "bf16 beside float32 masters" for each in lost)


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(4096, 14336), (64, 172), (2048, 5632), (100, 333), (3072, 8192)]
)
def test_the_inner_size_is_what_torchtitan_computes(hidden: int, intermediate: int) -> None:
    """Of torchtitan/models/llama3/model/model.py: FeedForward."""
    multiple, multiplier = inner_size(hidden, intermediate)
    inner = int(multiplier * int(2 * 4 * hidden / 3))
    assert multiple * ((inner + multiple - 1) // multiple) == intermediate


@pytest.mark.usefixtures("unpriced")
def test_a_llama_of_another_size_comes_with_its_sizes(tmp_path: Path) -> None:
    plan = replace(case("fsdp"), model=plans().plan.model)
    wrote = written(plan, "torchtitan", tmp_path)
    text = (tmp_path / "out" / "planned_model.py").read_text()
    compile(text, "planned_model.py", "exec")
    assert "dim=64,\n    n_layers=8,\n    n_heads=8,\n    n_kv_heads=4,\n" in text
    found = tomllib.loads((tmp_path / "out" / "train.toml").read_text())
    assert found["model"] == {"name": "planned", "flavor": "planned"}
    assert wrote.start.startswith("PYTHONPATH=")


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


@pytest.mark.usefixtures("unpriced")
@pytest.mark.parametrize(
    ("changes", "flavor", "factor"),
    [
        ({"rope_scaling": LLAMA_31_ROPE}, "8B", None),
        ({}, "planned", "1.0"),
        ({"rope_scaling": {**LLAMA_31_ROPE, "factor": 32.0}}, "planned", "32.0"),
        ({"rope_scaling": LLAMA_31_ROPE, "rms_norm_eps": 1e-6}, "planned", "8.0"),
    ],
)
def test_positions_are_scaled_as_the_models_are(
    changes: dict[str, Any], flavor: str, factor: str | None, tmp_path: Path
) -> None:
    """torchtitan's llama3 scales its rotary frequencies by 8, as Llama 3.1, if not told."""
    config = transformers.LlamaConfig(**{**LLAMA_8B, **changes})
    config.save_pretrained(tmp_path / "llama")
    model = replace(plans().plan.model, target=f"hf:{tmp_path / 'llama'}")
    written(replace(case("fsdp"), model=model), "torchtitan", tmp_path)
    found = tomllib.loads((tmp_path / "out" / "train.toml").read_text())
    assert found["model"]["flavor"] == flavor
    sizes = tmp_path / "out" / "planned_model.py"
    assert sizes.exists() == (factor is not None)
    assert factor is None or f"scaling_factor={factor}," in sizes.read_text()


def test_a_schedule_of_one_stage_per_rank_has_its_simple_name() -> None:
    one = configured(dp=2, pp=4, schedule="interleaved")
    assert to_supported(one).schedule == "1f1b"
    assert to_supported(replace(one, schedule="bfs")).schedule == "gpipe"
    assert to_supported(replace(one, schedule="chimera")).schedule == "1f1b"
