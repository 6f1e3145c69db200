"""``autoparallel explain``: alternatives priced, and what a change would make of a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.analysis.explain import explain, undivided
from autoparallel.analysis.plan_model import Alternative, PlanModel, load_plan_model
from autoparallel.analysis.what_if import Changed, changed_cluster, what_if, why_not
from autoparallel.cost_model.ops.memory import StateOptions
from autoparallel.options.parse import parse_parallel
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import Mesh
from autoparallel.report.explanation import changed_text

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width, odd):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.narrow, self.widen = nn.Linear(width, odd), nn.Linear(odd, width)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.widen(self.narrow(x))

class Net(nn.Module):
    def __init__(self, width=2048, odd=6, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, odd) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build_model(width=2048):
    return Net(width)

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 2048), "y": torch.zeros(global_batch, 2048)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""
SETTING = {
    "cluster": "4xA100-80GB",
    "global_batch": 4096,
    "precision": "bf16",
    "profile": "analytic",
}
FORCED = "zero=1,microbatches=2,recompute=none"
SMALL = {**SETTING, "cluster": "2xA100-80GB", "global_batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explained")
    (path / "deep.py").write_text(MODEL)
    target = str(path / "deep.py")
    for name, degrees, setting in (
        ("dp", "dp=4", SETTING),
        ("tp", "tp=4", SETTING),
        ("pp", "pp=2,dp=2,schedule=1f1b", SETTING),
        ("small", "dp=2", SMALL),
    ):
        found = autoparallel.plan(target, parallel=f"{degrees},{FORCED}", **setting)
        autoparallel.save_plan(found, path / f"{name}.json")
    return path


def model_of(folder: Path, name: str) -> PlanModel:
    path = folder / f"{name}.json"
    return load_plan_model(autoparallel.load_plan(path), str(path), trust=True)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, PlanModel]:
    return {name: model_of(folder, name) for name in ("dp", "tp", "pp")}


def forced(model: PlanModel, parallel: str) -> PlanModel:
    """Another search for it has few choices left."""
    return replace(model, options=replace(model.options, forced=parse_parallel(parallel)))


def by_name(model: PlanModel, name: str) -> dict[str, Alternative]:
    return {each.name: each for each in explain(model, name).alternatives}


def test_layouts_are_priced_with_the_plans_gradients(models: dict[str, PlanModel]) -> None:
    plan = models["dp"].plan
    halved = replace(plan, model=replace(plan.model, gradient_dtype="compute"))
    model = replace(models["dp"], plan=halved)
    assert model.prices(halved.stages[0]).states == StateOptions("compute")


@pytest.mark.parametrize(
    ("name", "alternative", "parallel"),
    [
        pytest.param(
            "zero", "ZeRO 0", "dp=4,zero=0,microbatches=2,recompute=none", marks=pytest.mark.slow
        ),
        pytest.param(
            "zero", "ZeRO 3", "dp=4,zero=3,microbatches=2,recompute=none", marks=pytest.mark.slow
        ),
        ("recompute", "full", "dp=4,zero=1,microbatches=2,recompute=full"),
        (
            "offload",
            "optimizer",
            "dp=4,zero=1,microbatches=2,recompute=none,offload=optimizer",
        ),
        pytest.param(
            "microbatches",
            "8 × 512",
            "dp=4,zero=1,microbatches=8,recompute=none",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_alternative_costs_what_a_plan_with_it_costs(
    models: dict[str, PlanModel], folder: Path, name: str, alternative: str, parallel: str
) -> None:
    """With data parallelism alone no layout depends on these choices."""
    forced = autoparallel.plan(str(folder / "deep.py"), parallel=parallel, **SETTING)
    found = by_name(models["dp"], name)[alternative]
    assert found.step_seconds == pytest.approx(forced.prediction.step_seconds, rel=1e-6)


def test_the_chosen_alternative_has_the_plans_own_figures(models: dict[str, PlanModel]) -> None:
    plan = models["dp"].plan
    for name in ("zero", "offload", "recompute", "microbatches", "schedule", "layers.0.up.weight"):
        chosen = [e for e in explain(models["dp"], name).alternatives if e.standing == "CHOSEN"]
        assert [each.step_seconds for each in chosen] == [plan.prediction.step_seconds]
        assert [each.memory_bytes for each in chosen] == [plan.prediction.peak_memory_bytes]


def test_a_layout_costs_no_more_than_the_plan_that_is_pinned_to_it(
    models: dict[str, PlanModel], folder: Path
) -> None:
    """``up`` split by rows needs no sum before the nonlinearity; by columns it does."""
    found = by_name(models["tp"], "layers.0.up.weight")
    assert found["dim 0 sharded over tp"].standing == "CHOSEN"
    other = found["dim 1 sharded over tp"]
    pinned = autoparallel.plan(
        str(folder / "deep.py"),
        parallel=f"tp=4,{FORCED}",
        pin="layers.*.up.weight=S(1)@tp",
        **SETTING,
    )
    chosen = models["tp"].plan.prediction.step_seconds
    assert other.standing == "SLOWER"
    assert chosen < other.step_seconds <= pinned.prediction.step_seconds * (1 + 1e-6)


def test_what_cannot_be_split_is_not_offered_and_says_why(models: dict[str, PlanModel]) -> None:
    found = by_name(models["tp"], "layers.1.narrow.weight")["dim 0 sharded over tp"]
    assert (found.standing, found.why) == ("NOT OFFERED", "6 is not divisible by tp=4")
    found = by_name(models["dp"], "microbatches")["2048 × 2"]
    assert (found.standing, found.why) == (
        "NOT OFFERED",
        "micro-batches of 2 cannot be split over dp=4",
    )


@pytest.mark.runs_stages
def test_what_is_cheaper_and_too_large_says_so(models: dict[str, PlanModel], folder: Path) -> None:
    """A plan with recomputation on devices that have just what it needs."""
    wide = autoparallel.plan(
        str(folder / "deep.py"), parallel="dp=4,zero=1,microbatches=2,recompute=full", **SETTING
    )
    free = models["dp"].plan.prediction.peak_memory_bytes
    limit = (wide.prediction.peak_memory_bytes + free) // 2
    assert wide.prediction.peak_memory_bytes < limit < free
    usable = models["dp"].plan.cluster.usable_memory_bytes
    factor = limit / usable
    cluster = changed_cluster(wide.cluster, [f"device.usable_memory_bytes=*{factor}"])
    path = folder / "tight.json"
    autoparallel.save_plan(replace(wide, cluster=cluster), path)
    found = by_name(model_of(folder, "tight"), "recompute")
    assert found["full"].standing == "CHOSEN"
    assert found["none"].standing == "CHEAPER BUT DOES NOT FIT"
    assert "too much" in found["none"].why


def test_what_is_cheaper_names_no_reason_that_the_plan_does_not_hold(
    models: dict[str, PlanModel],
) -> None:
    """Two micro-batches were fixed where one is faster."""
    found = by_name(models["dp"], "microbatches")["1 × 4096"]
    assert found.standing == "CHEAPER"
    assert found.why == "fixed otherwise, denied, or not searched for"
    ended = replace(models["dp"].plan.solver, stopped="its time limit")
    plan = replace(models["dp"].plan, solver=ended)
    found = by_name(replace(models["dp"], plan=plan), "microbatches")["1 × 4096"]
    assert found.why == "the search was ended by its time limit"


@pytest.mark.parametrize("parallel", ["dp=4,zero=3", "dp=4,zero=3,shard=4"])
def test_zero_within_a_host_is_priced_beside_zero_over_all_ranks(
    folder: Path, parallel: str
) -> None:
    setting = {**SETTING, "cluster": "2x2xA100-80GB@ethernet-10g"}
    parallel += ",microbatches=2,recompute=none"
    found = autoparallel.plan(str(folder / "deep.py"), parallel=parallel, **setting)
    autoparallel.save_plan(found, folder / "hosts.json")
    shown = {each.name: each for each in explain(model_of(folder, "hosts"), "zero").alternatives}
    chosen = "ZeRO 3" if "shard" in parallel else "ZeRO 3 within 2"
    assert [name for name, each in shown.items() if each.standing == "CHOSEN"] == [chosen]
    names = ["ZeRO 1", "ZeRO 1 within 2", "ZeRO 2 within 2", "ZeRO 3", "ZeRO 3 within 2"]
    assert set(names) <= set(shown)
    assert shown["ZeRO 3 within 2"].step_seconds < shown["ZeRO 3"].step_seconds


def test_blocks_and_stages_have_alternatives(models: dict[str, PlanModel]) -> None:
    found = by_name(models["pp"], "stage 1")
    assert found["ZeRO 1"].standing == "CHOSEN"
    assert {"ZeRO 3", "recompute full", "tp=2"} <= set(found)
    stages = models["pp"].plan.stages
    moved = by_name(models["pp"], stages[1].blocks[0].name)["in stage 0"]
    assert moved.standing in ("SLOWER", "CHEAPER", "TIE", "NOT OFFERED")
    schedules = by_name(models["pp"], "schedule")
    assert schedules["1F1B"].standing == "CHOSEN"
    assert schedules["GPipe"].memory_bytes >= schedules["1F1B"].memory_bytes


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("layers.0.up.wieght", "layers.0.up.weight"),
        ("recomputation", "recompute"),
        ("?", "zero"),
        ("stage 9", "the one stage is stage 0"),
    ],
)
def test_an_unknown_name_gets_similar_ones(
    models: dict[str, PlanModel], name: str, similar: str
) -> None:
    with pytest.raises(UsageError) as raised:
        explain(models["dp"], name)
    assert raised.value.code == "AP357"
    assert similar in raised.value.fix


def test_what_was_not_chosen_is_planned_and_its_terms_add_up(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(folder / "dp.json")
    assert run_command(["explain", path, "--why-not", f"tp=4,{FORCED}", "--trust", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    planned = autoparallel.load_plan(folder / "tp.json")
    first, second = found["plans"]
    assert second["step_seconds"] == pytest.approx(planned.prediction.step_seconds, rel=1e-6)
    assert second["choices"]["parallel"] == "tp=4"
    total = sum(found["difference_seconds"].values())
    assert total == pytest.approx(second["step_seconds"] - first["step_seconds"], rel=0.02)


def test_a_slower_link_costs_a_plan_what_planning_for_it_says(
    models: dict[str, PlanModel],
) -> None:
    model = forced(models["tp"], FORCED)
    found = what_if(model, ["link.intra.bytes_per_second=*0.01"], 20.0)
    assert found.now.prediction.step_seconds == pytest.approx(
        models["tp"].plan.prediction.step_seconds, rel=1e-6
    )
    assert found.same.prediction.step_seconds > 1.5 * found.now.prediction.step_seconds
    assert not found.stays
    assert found.found.prediction.step_seconds < found.same.prediction.step_seconds
    again = why_not(
        PlanModel(
            found.same,
            models["tp"].target,
            models["tp"].program,
            models["tp"].options,
            models["tp"].graph,
            models["tp"].basis,
        ),
        f"tp=4,{FORCED}",
        20.0,
    )
    assert again.prediction.step_seconds <= found.same.prediction.step_seconds * (1 + 1e-6)


@pytest.mark.slow
def test_a_change_that_nothing_fits_names_no_plan_as_the_answer(
    models: dict[str, PlanModel],
) -> None:
    """NCCL alone takes more than is left, which no plan changes."""
    model = forced(models["tp"], "microbatches=64,recompute=full")
    found = what_if(model, ["device.memory_bytes=0.9GiB"], 20.0)
    assert not found.stays
    assert "no plan was found that fits" in changed_text(found)


def test_a_plan_that_ties_with_the_one_that_is_found_stays(models: dict[str, PlanModel]) -> None:
    plan = models["tp"].plan
    faster = replace(
        plan,
        prediction=replace(plan.prediction, step_seconds=plan.prediction.step_seconds * 0.9999),
    )
    assert Changed(plan, plan, faster).stays
    assert "stays the best" in changed_text(Changed(plan, plan, faster))


def test_what_cannot_be_split_names_the_mesh_that_does_not_divide_it(
    models: dict[str, PlanModel],
) -> None:
    """Of stages on meshes of two kinds it is the second that splits samples."""
    plan = models["pp"].plan
    whole, split = plan.stages
    mixed = replace(plan, stages=(replace(whole, mesh=Mesh(("tp",), (2,))), split))
    assert undivided(mixed, 1) == split.mesh == Mesh(("dp",), (2,))
    assert undivided(mixed, 2) is None


def test_figures_of_a_cluster_change_by_value_unit_and_factor(
    models: dict[str, PlanModel],
) -> None:
    cluster = models["dp"].plan.cluster
    device = (
        changed_cluster(cluster, ["device.peak.bfloat16=*2", "device.memory_bytes=40GiB"])
        .hosts[0]
        .device
    )
    assert device.peak_flops["bfloat16"] == 2 * 312e12
    assert device.memory_bytes == 40 * 2**30
    assert device.usable_memory_bytes == pytest.approx(40 * 2**30 * 0.99, rel=1e-3)
    link = changed_cluster(cluster, ["link.intra.bytes_per_second=50GB/s"]).hosts[0].link
    assert link.bytes_per_second == 50e9


@pytest.mark.parametrize(
    ("change", "code", "fix"),
    [
        ("link.inter.bytes_per_secnod=1", "AP358", "link.inter.bytes_per_second"),
        ("device.peak.float7=1", "AP358", "device.peak_flops.float"),
        ("colour=blue", "AP358", ""),
        ("link.inter.bytes_per_second", "AP358", "FIGURE"),
        ("link.inter.bytes_per_second=fast", "AP359", "50GB/s"),
        ("device.memory_bytes=-1", "AP359", "80GiB"),
    ],
)
def test_changes_that_are_none_are_refused(
    models: dict[str, PlanModel], change: str, code: str, fix: str
) -> None:
    with pytest.raises(UsageError) as raised:
        changed_cluster(models["dp"].plan.cluster, [change])
    assert raised.value.code == code
    assert fix in str(raised.value)


def test_pages_fit_80_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "run.jsonl"
    run.write_text('{"step": 1, "seconds": 0.5, "memory_bytes": 1000, "loss": 1.0}\n')
    plan = str(folder / "small.json")
    for arguments in (
        ["layers.0.up"],
        ["microbatches"],
        ["--measured", str(run)],
        ["--what-if", "link.intra.bytes_per_second=1e9", "--time-limit", "5"],
        ["--why-not", "tp=2", "--time-limit", "5"],
    ):
        assert run_command(["explain", plan, *arguments, "--trust"]) == 0
        page = capsys.readouterr().out
        assert max(map(len, page.splitlines())) <= 80, page
    assert run_command(["explain", plan, "--measured", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    predicted = autoparallel.load_plan(plan).prediction.step_seconds
    assert found["figures"][-1]["error"] == pytest.approx(predicted / 0.5 - 1)
    assert run_command(["explain", plan]) == 2
    assert "AP360" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("ring", "attention passes keys and values from rank to rank"),
        ("ulysses", "attention splits heads after an all-to-all"),
    ],
)
def test_reports_name_the_way_of_attention_over_split_positions(
    way: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "plan.json")
    sizes = {"n_layer": 1, "d_model": 32, "n_head": 4, "seq": 32, "vocab": 64}
    command = ["plan", "examples/gpt.py", "--cluster", "cpu:2", "--profile", "analytic"]
    command += ["--seq", "32", "--global-batch", "2", "--parallel", "cp=2", "--allow", way]
    command += [word for name, size in sizes.items() for word in ("--set", f"{name}={size}")]
    assert run_command([*command, "-o", file]) == 0
    assert text in " ".join(capsys.readouterr().out.split())
    assert run_command(["explain", file, "scaled_dot_product_attention"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (text if way == "ring" else "dim 1 sharded over cp") in shown
