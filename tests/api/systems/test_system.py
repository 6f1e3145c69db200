"""Every system, over every case: files, batches, differences, prices."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from exported_plans import BATCH, CASES, NUM_DEVICES, SYSTEMS, case, plans, system_of, written
from marks import slow

from autoparallel.__main__ import run_command
from autoparallel.cost_model.cluster.shorthand import resolve_cluster
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan_files import save_plan
from autoparallel.systems.degrees import configuration_of
from autoparallel.systems.features import FEATURES, features_of
from autoparallel.systems.system import OVER_ALL, PricedConfig, candidates_of

ROOT = Path(__file__).resolve().parents[3]


PAIRS = [(system, name) for system in SYSTEMS for name in CASES]


@pytest.mark.parametrize(
    ("system", "name"),
    [
        pytest.param(*pair, marks=() if at % 7 == 0 else pytest.mark.slow)
        for at, pair in enumerate(PAIRS)
    ],
)
def test_what_a_system_lacks_is_listed_and_its_batches_multiply(
    system: str, name: str, tmp_path: Path
) -> None:
    plan, limits = case(name), system_of(system).limits
    wrote = written(plan, system, tmp_path)
    facts = wrote.facts
    degrees = facts["degrees"]
    assert prod(size for name, size in degrees.items() if name != "ep") == NUM_DEVICES
    assert degrees["dp"] % degrees["ep"] == 0
    assert facts["microbatch_size"] * facts["num_microbatches"] == BATCH
    assert facts["microbatch_size"] % degrees["dp"] == 0
    listed = {each["plan"]: each["here"] for each in facts["differences"]}
    for feature in features_of(plan):
        if feature.name in limits:
            assert listed[feature.text] == limits[feature.name]
        else:
            assert feature.text not in listed
    assert all(len(line) <= 80 for line in wrote.report.splitlines())
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(wrote.files)
    assert (tmp_path / "out" / "differences.txt").read_text() == wrote.report + "\n"


@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_degree_that_a_system_has_is_kept(system: str, kind: str) -> None:
    """Where a system has all degrees of a plan, they are the plan's, and so are micro-batches."""
    lacks = system_of(system).lacks
    for name in (name for name, (model, _) in CASES.items() if model == kind):
        own = configuration_of(case(name))
        first = next(iter(candidates_of(system_of(system), case(name))))
        if all(getattr(own, degree) == 1 for degree in lacks):
            for degree in ("dp", "tp", "cp", "ep", "pp", "microbatch_size", "num_microbatches"):
                assert getattr(first, degree) == getattr(own, degree), (name, degree)
        else:
            assert all(getattr(first, degree) == 1 for degree in lacks)


def test_missing_degrees_become_data_parallel_with_the_least_memory_first() -> None:
    """Eight ranks with a sample each: two micro-batches, ZeRO 3, all layers recomputed."""
    found = list(candidates_of(system_of("deepspeed"), case("1f1b")))
    first = found[0]
    assert (first.dp, first.pp, first.zero, first.recompute) == (8, 1, 3, "full")
    assert (first.microbatch_size, first.num_microbatches) == (8, 2)
    assert {own.zero for own in found} == {1, 3}
    assert {own.num_microbatches for own in found} == {1, 2}


def test_too_few_samples_become_tensor_parallelism_where_a_system_has_it() -> None:
    """Of 8 devices and 2 samples: two data-parallel ranks, and four of each one's tensors."""
    plan = case("1f1b")
    few = replace(plan, model=replace(plan.model, global_batch=2), num_microbatches=1)
    first = next(iter(candidates_of(system_of("deepspeed"), few)))
    assert (first.dp, first.tp, first.num_devices) == (2, 4, 8)
    without = replace(system_of("deepspeed"), lacks=("tp", "pp"))
    with pytest.raises(UsageError, match="AP364"):
        list(candidates_of(without, few))


@pytest.mark.slow
def test_a_plan_whose_model_is_there_is_priced(tmp_path: Path) -> None:
    """The configuration of a plan that fits its devices is priced beside it."""
    plan = replace(case("zero 1"), model=plans().plan.model)
    facts = written(plan, "deepspeed", tmp_path).facts
    assert facts["not_priced"] == ""
    assert facts["step_seconds"] > 0
    assert facts["fits"]
    report = (tmp_path / "out" / "differences.txt").read_text()
    assert "predicted: this configuration" in report


@pytest.mark.parametrize(
    ("system", "file", "text"),
    [
        slow("megatron", "args.txt", "--recompute-modules=layernorm"),
        ("torchtitan", "planned_config.py", "SelectiveAC.Config()"),
    ],
)
def test_selective_recomputation_that_keeps_more_is_written_where_all_that_is_kept_fits(
    system: str, file: str, text: str, tmp_path: Path
) -> None:
    """80 GB are enough for a small model without any recomputation, which is how it is priced."""
    plan = replace(case("selective"), model=plans().plan.model)
    facts = written(plan, system, tmp_path).facts
    assert (facts["recompute"], facts["fits"]) == ("selective", True)
    assert text in (tmp_path / "out" / file).read_text()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_plan_for_cpus_is_refused(system: str, tmp_path: Path) -> None:
    """Accelerate would start one process, and the Trainer would train by DDP."""
    plan = replace(case("fsdp"), cluster=resolve_cluster("cpu:8"))
    with pytest.raises(UsageError, match="AP365"):
        written(plan, system, tmp_path)
    assert not (tmp_path / "out").exists()


def test_adapters_that_a_system_does_not_train_are_not_priced(tmp_path: Path) -> None:
    """The plan's memory is that of adapters, and Megatron-LM trains every weight."""
    plan = case("fsdp")
    plan = replace(plan, model=replace(plan.model, settings={"lora": "r=8,alpha=16"}))
    wrote = written(plan, "megatron", tmp_path)
    assert wrote.facts["not_priced"] == "it trains all weights, the plan adapters alone"
    assert "all weights are trained" in " ".join(wrote.report.split())


def test_a_plan_whose_model_is_not_there_says_why_it_is_not_priced(tmp_path: Path) -> None:
    wrote = written(case("fsdp"), "deepspeed", tmp_path)
    assert wrote.facts["step_seconds"] is None
    assert "not priced" in wrote.report
    assert "missing.py" in wrote.report


def test_the_command_prints_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(case("zero bubble"), "plan.json")
    assert run_command(["export", "plan.json", "--to", "megatron", "-o", "out"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("out: args.txt, train.sh, differences.txt\nstart: ")
    assert "- plan: the schedule ZB-H2\n  here: 1F1B" in text
    assert (
        run_command(["export", "plan.json", "--to", "megatron", "-o", "out", "--force", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)["result"]
    assert found["degrees"] == {"dp": 2, "tp": 1, "cp": 1, "ep": 1, "pp": 4}


@pytest.mark.parametrize(
    ("system", "name", "text"),
    [
        ("torchtitan", "hsdp", "data_parallel_replicate_degree=2"),
        ("torchtitan", "zero 1 within groups", "data_parallel_shard_degree=2"),
        ("megatron", "hsdp", "--num-distributed-optimizer-instances=2"),
        ("accelerate", "hsdp", "parallelism_config_dp_replicate_size: 2"),
        ("transformers", "hsdp", "parallelism_config_dp_shard_size: 4"),
        ("deepspeed", "hsdp", None),
        ("accelerate", "zero 1 within groups", None),
    ],
)
def test_shards_within_groups_are_written_or_said_to_be_over_all_ranks(
    system: str, name: str, text: str | None, tmp_path: Path
) -> None:
    """Accelerate's ZeRO 1 is DeepSpeed's, which has no groups."""
    report = written(case(name), system, tmp_path).report
    files = "\n".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert (OVER_ALL in " ".join(report.split())) == (text is None)
    assert text is None or text in files


def test_the_documents_table_is_what_the_systems_say() -> None:
    """docs/export.md: a check where a system has a feature, a dash or a sentence where not."""
    text = (ROOT / "docs" / "export.md").read_text().partition("## What each can express")[2]
    (sentence,) = re.findall(r"None of them has .*", text)
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", text, re.MULTILINE)
    table = {name: [cell.strip() for cell in cells.split("|")][1:] for name, cells in rows}
    table |= {name: ["–"] * len(SYSTEMS) for name in re.findall(r"`([\w-]+)`", sentence)}
    assert sorted(table) == sorted(FEATURES)
    for name, cells in table.items():
        want = ["–" if name in system_of(system).limits else "✓" for system in SYSTEMS]
        assert cells == want, name


def test_what_does_not_fit_as_planned_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two candidates the first does not fit: all layers are recomputed, and the report says so.

    A stage of the plan recomputes nothing.
    """
    found = list(candidates_of(system_of("megatron"), case("zero 1")))
    assert [own.recompute for own in found] == ["none", "full"]
    limits = {"none": 2, "full": 1}

    def price(
        plan: Plan, path: Path, candidates: list[Configuration], *, trust: bool
    ) -> PricedConfig:
        chosen = min(candidates, key=lambda own: limits[own.recompute])
        return PricedConfig(chosen, 1.0, 1, True)

    monkeypatch.setattr("autoparallel.systems.system.price", price)
    wrote = written(case("zero 1"), "megatron", tmp_path)
    assert "--recompute-granularity=full" in (tmp_path / "out" / "args.txt").read_text()
    assert "without which it does not fit" in " ".join(wrote.report.split())
