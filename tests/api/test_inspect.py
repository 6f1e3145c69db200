"""``autoparallel inspect``: one screen, details on request, and the page with the plan's model."""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import pipeline_plan
from pages import drawn_plan
from rich.console import Console

from autoparallel import load_plan, save_plan
from autoparallel.__main__ import run_command
from autoparallel.actions.terminal import next_steps
from autoparallel.analysis.baselines import Baseline, baselines, fastest
from autoparallel.analysis.repriced import PricedAgain, price_again
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.simulator.actions import COMPUTE
from autoparallel.html.plan_page import page_sources
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.memory.stage_memory import memory_by_action
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.plan import Alternative, Plan
from autoparallel.planning.capture import capture_target
from autoparallel.report import ONE_SCREEN, print_report
from autoparallel.target.load import load_target

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build_model(width=64):
    return Net(width)

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 64), "y": torch.zeros(global_batch, 64)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""


def inspect(*arguments: str) -> int:
    return run_command(["inspect", *arguments])


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a small model of four layers in two stages on four devices."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "deep.py").write_text(MODEL)
    path = folder / "plan.json"
    found = run_command(
        [
            "plan",
            str(folder / "deep.py"),
            "--cluster",
            "4xA100-80GB",
            "--global-batch",
            "8",
            "--profile",
            "analytic",
            "--parallel",
            "dp=2,pp=2,microbatches=4,schedule=1f1b",
            "--no-cache",
            "-o",
            str(path),
        ]
    )
    assert found == 0
    return path


@pytest.fixture(scope="module")
def priced(plan_file: Path) -> PricedAgain:
    return price_again(load_plan(plan_file), str(plan_file), trust=True)


@pytest.fixture
def usual(tmp_path: Path) -> Path:
    """A usual plan, whose step is drawn and that has more alternatives than one screen."""
    plan = drawn_plan()
    more = tuple(Alternative(f"dp={n} · ZeRO 1 · 16 × 4", n, n, f"bubble +{n}") for n in (20, 30))
    save_plan(replace(plan, alternatives=plan.alternatives + more), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_report_fits_one_screen(usual: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(str(usual)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if re.match(r"[A-Z]", line)]
    found = [title.split(" (")[0].split(":")[0] for title in titles]
    assert found == [
        "Stages",
        "Peak memory",
        "Step time of the slowest rank",
        "Timeline of a step",
        "How sure",
        "Alternatives",
        "Next",
    ]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--memory", r"gradients +8\.00 GiB +14 % +█"),
        ("--candidates", r"bubble \+30"),
        ("--layouts", r"dim 0 sharded over tp +attn\.qkv\.weight"),
        ("--all", r"planning time: "),
    ],
)
def test_details_are_shown_on_request(
    usual: Path, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    assert inspect(str(usual)) == 0
    assert not re.search(text, capsys.readouterr().out)
    for asked in (option, "--all"):
        assert inspect(str(usual), asked) == 0
        assert re.search(text, capsys.readouterr().out)


def test_all_stages_are_shown_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = pipeline_plan()
    many = replace(plan, stages=plan.stages * 8, schedule="interleaved")
    save_plan(many, tmp_path / "plan.json")
    assert inspect(str(tmp_path / "plan.json")) == 0
    assert "(--stages shows all)" in capsys.readouterr().out
    assert inspect(str(tmp_path / "plan.json"), "--stages") == 0
    text = capsys.readouterr().out
    assert "(--stages shows all)" not in text
    assert re.search(r"^ +15 +layers", text, re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("colours", [True, False])
def test_colours_change_no_word_and_no_color_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch, width: int, colours: bool
) -> None:
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    texts = []
    for terminal in (True, False):
        file = io.StringIO()
        system = "standard" if terminal else None
        console = Console(file=file, width=width, force_terminal=terminal, color_system=system)
        print_report(drawn_plan(), console, ONE_SCREEN)
        texts.append(file.getvalue())
    plain = re.sub(r"\x1b\[[\d;]*m", "", texts[0])
    assert [line.rstrip() for line in plain.splitlines()] == texts[1].splitlines()
    codes = {code for part in re.findall(r"\x1b\[([\d;]*)m", texts[0]) for code in part.split(";")}
    assert bool(codes & {str(code) for code in range(30, 38)}) is colours
    assert max(map(len, texts[1].splitlines())) <= width


def test_pricing_again_finds_the_plans_own_figures(plan_file: Path, priced: PricedAgain) -> None:
    """The step, and the memory of the fullest moment, are those that were planned."""
    plan = load_plan(plan_file)
    assert priced.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
    most = max(sum(held.values()) for _, held in priced.memory)
    assert most == pytest.approx(plan.prediction.peak_memory_bytes, abs=16)
    assert len(priced.timeline.events) == 2


def test_the_memory_of_a_rank_is_known_at_each_of_its_actions(
    plan_file: Path, priced: PricedAgain
) -> None:
    """Under 1F1B rank 0 holds two micro-batches' activations in the middle, none at the end."""
    plan = load_plan(plan_file)
    program = capture_target(load_target(plan.model.target), PlanOptions(global_batch=8))
    held = memory_by_action(plan, program.graph, program.blocks, 0)
    acts = [action for action, _ in held]
    assert [str(action) for action in acts if action.kind in COMPUTE] == [
        "0F0",
        "0F1",
        "0B0",
        "0F2",
        "0B1",
        "0F3",
        "0B2",
        "0B3",
    ]
    last = next(own for action, own in held if action.kind == "STEP")
    assert last.get("activations", 0.0) == 0
    both = [own["activations"] for action, own in held if action.kind == "F"]
    assert both[1] > both[0]
    assert both[1] == pytest.approx(both[2])


def test_the_flops_of_the_ops_are_those_of_the_model(plan_file: Path, priced: PricedAgain) -> None:
    """Eight linear layers of 64 × 256 weights, 8 samples: 2 FLOPs forward, 4 backward, of which
    the first layer needs no gradient of its input. On 4 devices each does a half of a stage's."""
    plan = load_plan(plan_file)
    linear = [op for op in priced.ops if op.family == "matmul"]
    per_device = sum(op.count * op.flops for op in linear) * plan.num_microbatches
    products = 8 * 3 - 1
    assert per_device == pytest.approx(products * 2 * 8 * 64 * 256 / 2)
    assert priced.shapes["layers.0.up.weight"] == (256, 64)


def test_baselines_are_what_their_configurations_cost(plan_file: Path, priced: PricedAgain) -> None:
    plan = load_plan(plan_file)
    ddp, fsdp, grid = priced.baselines
    assert [ddp.name, fsdp.name, grid.name] == ["DDP", "FSDP", "3-D (Megatron)"]
    assert ddp.configuration.startswith("dp=4 · ZeRO 0")
    assert fsdp.configuration.startswith("dp=4 · ZeRO 3")
    assert all(each.fits for each in priced.baselines)
    best = fastest(priced.baselines)
    assert best is not None
    assert best.step_seconds == min(each.step_seconds for each in priced.baselines)
    slower = Baseline("DDP", "dp=4", 0.0001, 1.0, fits=False)
    assert fastest([slower]) is None
    assert plan.cluster.num_devices == 4


def test_a_batch_too_small_for_data_parallelism_is_said(plan_file: Path) -> None:
    plan = load_plan(plan_file)
    few = replace(plan, model=replace(plan.model, global_batch=2))
    program = capture_target(load_target(plan.model.target), PlanOptions(global_batch=8))
    found = baselines(ConfigurationPricer(program.graph, program.blocks), few)
    assert found[0] == Baseline(
        "DDP", reason="a global batch of 2 samples cannot be split over dp=4"
    )


def test_the_page_has_the_model_in_it(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert inspect(str(plan_file), "--html", str(page), "--trust") == 0
    assert f"written to {page}" in capsys.readouterr().err
    text = page.read_text()
    assert "against baselines" in text
    assert "256 × 64" in text
    assert "needs the plan's model" not in text
    assert inspect(str(plan_file), "--html", str(page), "--no-target") == 0
    assert "the model was not loaded (--no-target)" in page.read_text()


def test_a_page_that_cannot_be_written_is_an_error(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "no_folder" / "report.html"
    assert inspect(str(plan_file), "--html", str(page), "--no-target") == 2
    assert "error[AP101]: cannot write" in capsys.readouterr().err


def test_a_target_that_cannot_be_loaded_is_said_in_the_page(
    usual: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = load_plan(usual)
    found = page_sources(plan, str(usual), loads_target=True, trust=True)
    assert found.priced is None
    assert found.missing == "there is no file examples/llama.py (AP101)"
    assert "the page is without baselines" in capsys.readouterr().err


def test_a_model_that_has_changed_is_said_in_the_page(plan_file: Path) -> None:
    plan: Plan = load_plan(plan_file)
    other = replace(plan, model=replace(plan.model, fingerprint="0" * 16))
    found = page_sources(other, str(plan_file), loads_target=True, trust=True)
    assert found.missing == "the plan was made for another model (AP550)"


def test_where_nothing_fits_the_baseline_says_so_and_that_time_ended(plan_file: Path) -> None:
    """On devices of one byte nothing fits; without time one configuration of each is priced."""
    plan = load_plan(plan_file)
    host = plan.cluster.hosts[0]
    device = replace(host.device, usable_memory_bytes=1)
    small = replace(plan, cluster=replace(plan.cluster, hosts=(replace(host, device=device),)))
    program = capture_target(load_target(plan.model.target), PlanOptions(global_batch=8))
    pricer = ConfigurationPricer(program.graph, program.blocks)
    ddp, fsdp, grid = baselines(pricer, small, limit_seconds=0.0)
    for each in (ddp, fsdp):
        assert (each.fits, each.num_priced, each.is_cut_short) == (False, 1, True)
        assert each.reason == "none fits; this one exceeds the memory least"
    assert grid.reason == "no degrees leave room for the states of the parameters"
    assert fastest((ddp, fsdp, grid)) is None


@pytest.mark.parametrize(("cluster", "last"), [("cpu:2", "run"), ("2x8xH100", "launch")])
def test_the_next_command_is_for_the_machine_that_the_plan_is_for(cluster: str, last: str) -> None:
    plan = replace(pipeline_plan(), cluster=parse_cluster(cluster))
    steps = next_steps(plan, "my plans/a.json")
    assert [shlex.split(command)[:2] for command, _ in steps][-1] == ["autoparallel", last]
    assert all("my plans/a.json" in shlex.split(command) for command, _ in steps)
