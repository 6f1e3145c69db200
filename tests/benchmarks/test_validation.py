"""``benchmarks/validation``: what it reports of small files of measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.validation.pricing import Result
from benchmarks.validation.published import published
from benchmarks.validation.run import DATA, TABLES, Report, main, report
from benchmarks.validation.run import Pricer as PricerOfRuns
from benchmarks.validation.scores import by_zero, compile_gains, kendall_tau, regrets, score
from benchmarks.validation.tables import Run, Skipped, padded, read
from benchmarks.validation.vtrain import single_node

HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
GROUP = ("2,8,2,256,4,6,128,1,2,1,30", "2,8,4,256,4,6,128,2,1,1,20", "2,8,1,256,4,6,128,1,1,2,40")
BAD = {
    "2,8,2,256,4,6,128,1,1,1,30": "is not 2 devices",
    "2,8,3,256,4,6,128,1,2,1,30": "is not dp 2 × micro-batches of 3",
    "2,8,2,256,4,6,128,,2,1,30": "tensor parallelism is ''",
    "2,8,2,256,4,6,128,1,2,1,OOM": "iteration time is 'OOM'",
    "6,8,2,252,4,6,128,3,2,1,30": "tp 3 does not divide 4 heads",
}
RUNS_HEADER = (DATA / "published_runs.csv").read_text(encoding="utf-8").splitlines()[0]
FIGURES = (
    "n",
    "mean_abs_error",
    "median_abs_error",
    "mean_regret",
    "worst_regret",
    "oom_right",
    "rows",
)


def write(folder: Path, lines: tuple[str, ...], header: str = HEADER) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
    return path


def result(run: Run, seconds: float) -> Result:
    return Result(run, seconds, 0.0, True)


def runs_of(folder: Path, lines: tuple[str, ...]) -> list[Run]:
    return [each for each in read(write(folder, lines), single_node) if isinstance(each, Run)]


def test_the_json_has_the_figures_and_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, (*GROUP, *BAD))
    assert main(["--vtrain-single", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert list(found) == ["vtrain_single"]
    own = found["vtrain_single"]
    assert set(FIGURES) <= set(own)
    assert (own["n"], own["skipped"], len(own["rows"])) == (3, len(BAD), 3 + len(BAD))
    assert [row["measured_seconds"] for row in own["rows"][:3]] == [0.03, 0.02, 0.04]
    errors = [
        abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in own["rows"][:3]
    ]
    assert own["mean_abs_error"] == pytest.approx(sum(errors) / 3)
    assert own["median_abs_error"] == pytest.approx(sorted(errors)[1])
    chosen = min(own["rows"][:3], key=lambda row: row["predicted_seconds"])
    assert own["mean_regret"] == pytest.approx(chosen["measured_seconds"] / 0.02 - 1)


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=list(BAD.values()))
def test_a_row_that_cannot_be_priced_says_why(tmp_path: Path, line: str, reason: str) -> None:
    (found,) = read(write(tmp_path, (line,)), single_node)
    assert isinstance(found, Skipped)
    assert reason in found.reason


def test_regret_is_what_the_choice_loses_to_the_best_measured(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, GROUP)
    right = [result(run, seconds) for run, seconds in zip(runs, (3.0, 1.0, 4.0), strict=True)]
    wrong = [result(run, seconds) for run, seconds in zip(runs, (1.0, 3.0, 4.0), strict=True)]
    assert list(regrets(right).values()) == [0.0]
    assert list(regrets(wrong).values()) == [pytest.approx(0.5)]
    assert regrets(wrong[:1]) == {}, "one configuration is no choice"
    assert list(regrets(wrong[::2], runs).values()) == [pytest.approx(0.5)], "20 ms was there"


def test_order_and_verdicts_are_counted(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, GROUP)
    found = [result(run, seconds) for run, seconds in zip(runs, (3.0, 1.0, 4.0), strict=True)]
    assert kendall_tau(found) == 1.0
    found[1] = result(runs[1], 3.5)
    assert kendall_tau(found) == pytest.approx(1 / 3)
    assert (score(found).fit_right, score(found).oom_rows) == (3, 0)


def test_a_published_run_out_of_memory_is_judged_by_whether_it_fits(tmp_path: Path) -> None:
    cells = dict.fromkeys(RUNS_HEADER.split(","), "")
    cells |= {
        "source": "handmade",
        "model": "GPT",
        "layers": "4",
        "hidden": "256",
        "heads": "4",
        "vocab": "1000",
        "seq_len": "128",
        "gpu_type": "A100-80GB-SXM4",
        "n_gpus": "2",
        "gpus_per_node": "8",
        "interconnect": "NVLink3",
        "global_batch_seqs": "8",
        "micro_batch": "2",
        "dp": "2",
        "tp": "1",
        "pp": "1",
        "cp": "1",
        "zero_stage/fsdp": "ZeRO-3",
        "recompute": "full",
        "schedule": "no pipeline",
        "precision": "fp16",
        "attention_impl": "unfused",
        "measured_metric": "iter_time_s",
        "quality": "A",
    }
    rows = [
        {**cells, "row_id": "ran", "measured_value": "0.1", "derived_iter_time_s": "0.1"},
        {**cells, "row_id": "oom", "measured_value": "OOM"},
        {**cells, "row_id": "tpu", "gpu_type": "TPUv3 core 16GB"},
        {**cells, "row_id": "fp8", "precision": "fp8", "quality": "B"},
    ]
    path = write(tmp_path, tuple(",".join(row.values()) for row in rows), RUNS_HEADER)
    found: Report = report(TABLES[2], path, PricerOfRuns())
    own = found.headline
    assert (own.n, own.skipped, own.oom_rows, own.oom_right, own.fit_right) == (1, 1, 1, 0, 1)
    reasons = {each.name: each.reason for each in found.results if isinstance(each, Skipped)}
    assert set(reasons) == {"tpu", "fp8"}
    assert "TPU" in reasons["tpu"]
    assert "8 bits" in reasons["fp8"]


def test_the_copied_measurements_are_read() -> None:
    single = read(DATA / "vtrain_a100_single_node.csv", single_node)
    assert len(single) == 900
    assert all(isinstance(each, Run) for each in single)
    assert len({each.group for each in single if isinstance(each, Run)}) == 90


def test_the_vocabulary_is_padded_as_megatron_pads_it() -> None:
    assert padded(51200, 8) == 51200
    assert padded(50257, 1) == 50304


def copied_runs() -> dict[str, Run]:
    rows = read(DATA / "published_runs.csv", published)
    return {each.name: each for each in rows if isinstance(each, Run)}


def test_chunks_of_one_layer_leave_the_ends_to_embedding_and_head() -> None:
    """22 layers, 24 with the embedding and the head: 3 chunks on each of 8 ranks."""
    own = copied_runs()["zb_1.5B_1F1B-I_24mb"].configuration
    assert (own.pp, own.num_chunks, own.layers) == (8, 3, (0, *(1,) * 22, 0))


def test_chunks_of_an_interleaved_schedule_are_read_by_either_name() -> None:
    own = copied_runs()["korth_530B_full"].configuration
    assert (own.schedule, own.num_chunks) == ("interleaved-1f1b", 3)


def test_a_pipeline_of_torchtitan_has_its_default_number_of_microbatches() -> None:
    """It adds up whole gradients until the last, as ZeRO 1 does."""
    runs = copied_runs()
    run = runs["titan_405B_512_interleaved"]
    own = run.configuration
    assert (own.pp, own.num_microbatches, own.num_chunks, own.zero) == (8, 8, 2, 1)
    assert run.assumed == ("micro_batch", "virtual stages")
    assert runs["titan_70B_256_2d"].configuration.zero == 3


def test_states_that_are_sharded_within_groups_are_read_so() -> None:
    runs = copied_runs()
    found = [runs[name].configuration for name in ("dgxc2502_maxtext70B_bf16_512", "fms_7b_h100")]
    assert [(own.zero, own.shard) for own in found] == [(3, 128), (3, 8)]


def test_gradients_are_accumulated_as_the_row_says() -> None:
    runs = copied_runs()
    bf16 = runs["bloom_12288x106_a96_d8t4p12m2_g2048_02-28"].program
    fp16 = runs["bloom_12288x106_a96_d8t4p12m2_g2048_02-27"].program
    one = runs["dlperf_ds_gpt2s_8_z0"]
    assert (bf16.second_gradients, bf16.accumulation) == (0.5, 4.5)
    assert (fp16.second_gradients, fp16.accumulation) == (0.0, 3.0)
    assert (one.configuration.num_microbatches, one.program.accumulation) == (1, 0.0)


def test_gpus_without_bfloat16_compute_in_float16() -> None:
    runs = copied_runs()
    found = {
        name: runs[name].configuration.precision
        for name in ("alpa_megatron_350M_1", "bloom_12288x106_a96_d8t4p12m2_g2048_02-28")
    }
    assert list(found.values()) == ["fp16", "bf16"]


def test_products_of_8_bits_are_priced_where_devices_have_them() -> None:
    runs = copied_runs()
    own = {name: runs[name] for name in ("dgxc2502_8B_fp8_8", "titan_8B_8gpu_compile_fp8")}
    assert {run.configuration.precision for run in own.values()} == {"fp8"}
    assert [run.assumptions.cast_bytes for run in own.values()] == [4.0, 6.0]


def test_recomputation_of_some_layers_or_ops_is_read_as_shares() -> None:
    runs = copied_runs()
    some, most = runs["fms_13b_h100"].configuration, runs["fms_34b_h100"].configuration
    assert (some.recompute, most.recompute, most.recompute_share) == ("full", "full", 1.0)
    assert some.recompute_share == pytest.approx(3 * (0.69 / 0.61 - 1))
    by_op = runs["dgxc2502_maxtext70B_bf16_128"].configuration
    assert by_op.recompute == "selective"
    assert by_op.selective_share == pytest.approx(1.25 / (2.25 + 3 * 3.5))


def test_a_source_has_its_own_kernels_and_what_it_read_of_memory() -> None:
    runs = copied_runs()
    a100, h100 = (
        runs[f"lf_{gpu}_80gb_7b_65536_8"].cluster.hosts[0].device.efficiency["attention"]
        for gpu in ("a100", "h100")
    )
    assert (a100, h100) == (0.325, 0.19)
    names = ("titan_8B_8gpu_eager", "titan_8B_8gpu_compile", "zb_1.5B_1F1B-I_24mb")
    assert [runs[name].program.cached for name in names] == [0.23, 0.135, 0.0]


def test_results_are_told_apart_by_zero_stage() -> None:
    runs = copied_runs()
    names = ("zb_1.5B_1F1B-I_24mb", "titan_8B_8gpu_eager", "sc21_t2_zero3_175B_384")
    stages = by_zero([result(runs[name], 1.0) for name in names])
    assert {stage: len(found) for stage, found in stages.items()} == {
        "0": 1,
        "3": 1,
        "3, DeepSpeed of 2021": 1,
    }


def test_the_gain_of_compiling_is_within_five_points_of_the_published_one(tmp_path: Path) -> None:
    lines = (DATA / "published_runs.csv").read_text(encoding="utf-8").splitlines()
    names = ("titan_8B_8gpu_eager,", "titan_8B_8gpu_compile,")
    pair = tuple(line for line in lines if any(name in line for name in names))
    rows = read(write(tmp_path, pair, RUNS_HEADER), published)
    results = [PricerOfRuns().result(row) for row in rows if isinstance(row, Run)]
    (gain,) = compile_gains([each for each in results if isinstance(each, Result)])
    assert gain.measured == pytest.approx(6667 / 5762 - 1, abs=1e-3)
    assert abs(gain.predicted - gain.measured) < 0.05
    assert gain.measured_bytes is not None
    assert gain.predicted_bytes == pytest.approx(gain.measured_bytes, abs=0.01)
