"""``autoparallel estimate``: the fewest devices, and what a run there takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.analysis import estimate as estimating
from autoparallel.analysis.estimate import Asked, clusters_of, estimate_target, parse_devices
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.options.parse import parse_count
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.report.estimates import (
    estimates_json,
    memory_unit,
    print_estimates,
    sort_estimates,
)
from autoparallel.target.load import load_target

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 16000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
NUM_PARAMETERS = 2 * 16000 * 8192 + 2 * (4 * 8192**2 + 3 * 8192 * 22016 + 2 * 8192) + 8192
"""Embedding and head, and of a layer four projections, three of the MLP, and two norms."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def found(llama: str) -> tuple[autoparallel.analysis.estimate.Estimate, ...]:
    return autoparallel.estimate(
        llama,
        devices="A10G",
        global_batch=4,
        seq=128,
        tokens=1e9,
        prices={"A10G": 1.5},
        seconds=30.0,
        processes=1,
    )


def test_the_fewest_devices_are_those_that_the_states_need(found) -> None:
    """Training in bf16 with AdamW holds 16 bytes per parameter at the least: the float32 copy that
    is stepped, its gradient, and two moments. That is more than a card has, and less than two
    have. Training adapters holds the frozen weights in 2 bytes.
    """
    usable = 23028 * 2**20 * 99 // 100
    assert usable - 2**30 > 6 * NUM_PARAMETERS
    assert usable < 16 * NUM_PARAMETERS < 2 * (usable - 2**30)
    full, lora = found
    assert (full.method, full.num_devices) == ("full", 2)
    assert (lora.method, lora.num_devices) == ("lora", 1)
    for each in found:
        assert each.plan.prediction.peak_memory_bytes <= usable


@pytest.mark.slow
def test_nothing_fits_on_fewer_devices_than_an_estimate_names(llama: str) -> None:
    fewer = autoparallel.estimate(
        llama, devices="1xA10G", global_batch=4, seq=128, seconds=60.0, processes=1
    )
    assert [(each.plan is None, each.why) for each in fewer] == [
        (True, "does not fit on 1"),
        (False, ""),
    ]


def test_days_and_dollars_follow_from_the_rate_and_the_price(found) -> None:
    full = found[0]
    seconds = 1e9 / full.plan.prediction.tokens_per_second
    assert full.days == pytest.approx(seconds / 86400)
    assert full.dollars == pytest.approx(seconds / 3600 * 2 * 1.5)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(model_file: Path) -> None:
    def figures(processes: int) -> list[tuple[str, int | None, float]]:
        both = autoparallel.estimate(
            str(model_file),
            devices=["2xH100", "A100-80GB"],
            global_batch=4,
            seconds=60.0,
            processes=processes,
        )
        return [(each.device, each.num_devices, each.plan.prediction.step_seconds) for each in both]

    assert figures(2) == figures(1)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_repeated_question_is_answered_without_a_search(
    processes: int, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes each makes values for the cache, those too that nothing fits."""
    monkeypatch.setenv("AUTOPARALLEL_CACHE", str(tmp_path))
    target = load_target(llama, {})
    asked = Asked(("2xA10G", "T4"), 4, 128, lora=None, max_devices=1, processes=processes)
    with plan_cache() as cache:
        first = estimate_target(target, asked, cache=cache.values)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(estimating, "plan", refuse)
    with plan_cache() as cache:
        again = estimate_target(target, asked, cache=cache.values)
    assert [each.plan is None for each in first] == [False, True]
    assert estimates_json(again) == estimates_json(first)


def test_the_page_fits_80_columns(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms are of one search."""
    found = []

    def once(*arguments: object) -> tuple[estimating.Estimate, ...]:
        if not found:
            found.append(search(*arguments))
        return found[0]

    search = estimating.estimate_target
    monkeypatch.setattr("autoparallel.actions.estimate.estimate_target", once)
    arguments = [
        "estimate",
        llama,
        "--devices",
        "2xA10G,T4",
        "--global-batch",
        "4",
        "--seq",
        "128",
        "--tokens",
        "1B",
        "--price",
        "A10G=1.5",
        "--max-devices",
        "1",
        "--lora",
        "none",
    ]
    assert run_command(arguments) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert "T4 train: does not fit on 1" in page
    assert "2xA10G" in page
    assert "Memory of the fullest device" in page
    assert run_command([*arguments, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["result"]
    assert [(each["device"], each["fits"]) for each in entries] == [("2xA10G", True), ("T4", False)]
    assert entries[0]["precision"] == "bf16"
    assert sum(entries[0]["memory_bytes"].values()) == entries[0]["peak_memory_bytes"]


@pytest.fixture(scope="module")
def small() -> tuple[autoparallel.analysis.estimate.Estimate, ...]:
    return autoparallel.estimate("examples/gpt.py", devices="T4", global_batch=8, processes=1)


def test_each_estimate_is_one_line_and_sorts_by_a_figure(found, capsys) -> None:
    print_estimates(found, Console(width=80))
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert len(table) == 1 + len(found)
    assert [line.split()[0] for line in table[1:]] == [each.device for each in found]
    for key in ("devices", "days", "dollars"):
        figures = [getattr(each, f"num_{key}" if key == "devices" else key) for each in found]
        ordered = sort_estimates([*found, replace(found[0], plan=None)], key)
        assert ordered[-1].plan is None
        own = [getattr(each, f"num_{key}" if key == "devices" else key) for each in ordered]
        assert own[:-1] == sorted(figures)


def test_days_cannot_be_sorted_without_tokens(capsys) -> None:
    assert run_command(["estimate", "model.py", "--sort", "days"]) == 2
    assert "error[AP352]: --sort days needs --tokens" in capsys.readouterr().err


def test_what_small_models_hold_is_said_in_mebibytes(found, small, capsys) -> None:
    assert memory_unit(small) == memory_unit([*small, *found]) == "MiB"
    assert memory_unit(found[:1]) == "GiB"
    print_estimates(small, Console(width=80))
    page = capsys.readouterr().out
    assert "Memory of the fullest device, MiB" in page
    peak = small[0].plan.prediction.peak_memory_bytes
    assert f"{peak / 2**20:.0f}" in page


def test_a_model_of_a_file_is_estimated_without_adapters(small) -> None:
    assert [(each.method, each.num_devices) for each in small] == [("full", 1)]
    assert small[0].plan.model.precision == "fp16"
    with pytest.raises(UsageError) as raised:
        autoparallel.estimate("examples/gpt.py", devices="T4", lora="r=4", processes=1)
    assert raised.value.code == "AP351"


@pytest.mark.parametrize("text", ["", "H10O", "8xH101", "H100@nvlink9", "0xH100"])
def test_devices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_devices(text)
    assert raised.value.code == "AP350"
    assert raised.value.fix


def test_hosts_are_filled_before_there_are_more_of_them() -> None:
    assert [each.num_devices for each in clusters_of("A100-40GB", 64)] == [
        *range(1, 9),
        10,
        12,
        14,
        16,
        32,
        48,
        64,
    ]
    assert [each.num_devices for each in clusters_of("A100-40GB", 7)] == [1, 2, 3, 4, 5, 6, 7]
    assert [each.num_devices for each in clusters_of("4xH100", 64)] == [4]
    assert [each.num_devices for each in clusters_of("GB200", 300)] == [
        *range(1, 9),
        10,
        12,
        14,
        16,
        20,
        24,
        28,
        32,
        40,
        48,
        56,
        64,
        72,
        144,
        216,
        288,
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_full_planner_needs_as_many_devices(tmp_path: Path) -> None:
    """30.1 GB of states, on cards of which two have 30.9 GB for all: three are needed, no power of
    two. The full planner takes all proposers, schedules and stages of any size. The model has as
    many parameters as ``LLAMA``, in layers of which three cards hold eight, but not two large ones.
    """
    smaller = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8}
    smaller |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | smaller))
    llama = f"hf:{tmp_path}"

    def fits(count: int) -> bool:
        try:
            found = autoparallel.plan(
                llama,
                cluster=f"{count}xT4",
                global_batch=4,
                seq=128,
                precision="fp16",
                deny=["offload"],
            )
        except InfeasibleError:
            return False
        return found.prediction.peak_memory_bytes <= found.cluster.usable_memory_bytes

    (full,) = autoparallel.estimate(
        llama, devices="T4", global_batch=4, seq=128, lora="none", processes=1
    )
    assert next(filter(fits, (1, 2, 3, 4))) == full.num_devices == 3


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1e", "15 tokens", "1.2.3"])
def test_a_text_that_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_count(text, "--tokens")
    assert raised.value.code == "AP352"
