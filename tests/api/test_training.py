"""The whole way on real processes: plan, run, verify; and a script under torchrun."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_python, run_torchrun
from forced_plans import settled
from small_gpt import save_gpt

from autoparallel import load_plan, save_plan

GPT = (
    "brief_gpt.py",
    "--set",
    "n_layer=2",
    "--set",
    "d_model=32",
    "--set",
    "n_head=2",
    "--seq",
    "16",
    "--global-batch",
    "8",
    "--cluster",
    "cpu:2",
)


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, in the folder of the model."""
    return run_python("-m", "autoparallel", *arguments, folder=folder)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_gpt(path.parent)
    done = command(path.parent, "plan", *GPT, "--parallel", settled("pp=2"), "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "pp=2" in done.stdout
    assert "autoparallel: capture" in done.stderr
    return path


@pytest.mark.slow
def test_a_plan_trains_and_is_compared_with_its_prediction(plan_file: Path) -> None:
    done = command(plan_file.parent, "run", str(plan_file), "--steps", "4")
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"^step +\d+  loss ([\d.]+)", done.stdout, re.M)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 6.0
    assert re.search(
        r"^step time +measured .* predicted .*\(\d+ % too (high|low)\)$", done.stdout, re.M
    )
    assert re.search(
        r"^memory +measured .* predicted .*\(\d+ % too (high|low)\)$", done.stdout, re.M
    )


@pytest.mark.slow
def test_a_run_that_is_verified_first_has_the_losses_of_the_run_alone(plan_file: Path) -> None:
    alone = command(plan_file.parent, "run", str(plan_file), "--steps", "3")
    both = command(plan_file.parent, "run", str(plan_file), "--steps", "3", "--verify")
    assert both.returncode == 0, both.stderr
    steps = re.compile(r"^step +\d+  loss [\d.]+  grad_norm [\d.]+", re.M)
    assert steps.findall(both.stdout) == steps.findall(alone.stdout) != []
    words = ("verification, then 3 steps", "verified: ", "was verified against", "step    1")
    places = [both.stdout.index(each) for each in words]
    assert places == sorted(places)


def test_verification_of_a_run_that_may_lose_hosts_is_refused(plan_file: Path) -> None:
    hosts = ("--nnodes", "1:2", "--rdzv-endpoint", "127.0.0.1:29400", "--elastic")
    done = command(plan_file.parent, "run", str(plan_file), "--verify", *hosts)
    assert done.returncode == 2
    assert "error[AP156]: --verify of a run with --elastic" in done.stderr


@pytest.mark.slow
def test_training_resumes_under_another_plan_as_if_it_had_not_stopped(
    plan_file: Path, tmp_path: Path
) -> None:
    def losses(*arguments: str) -> list[str]:
        done = command(plan_file.parent, "run", *arguments)
        assert done.returncode == 0, done.stderr
        return re.findall(r"^step +\d+  loss [\d.]+", done.stdout, re.M)

    whole = losses(str(plan_file), "--steps", "4")
    saved = str(tmp_path / "checkpoints")
    saving = ("--save", saved, "--save-every", "1", "--keep", "1", "--save-async")
    first = losses(str(plan_file), "--steps", "2", *saving)
    assert [path.name for path in Path(saved).glob("step-*")] == ["step-00000002"]
    assert Path(saved, "plan.json").exists()
    rest = losses(*GPT, "--parallel", "dp=2,zero=3", "--steps", "2", "--resume", saved)
    assert first + rest == whole


def test_options_of_saving_need_a_folder(plan_file: Path) -> None:
    done = command(plan_file.parent, "run", str(plan_file), "--steps", "1", "--keep", "2")
    assert done.returncode == 2
    assert "error[AP891]" in done.stderr


@pytest.mark.slow
def test_resuming_from_a_folder_without_checkpoint_is_refused(
    plan_file: Path, tmp_path: Path
) -> None:
    done = command(
        plan_file.parent, "run", str(plan_file), "--steps", "1", "--resume", str(tmp_path)
    )
    assert done.returncode == 2
    assert "error[AP132]" in done.stderr


@pytest.mark.slow
def test_a_plan_is_verified_against_one_device(plan_file: Path) -> None:
    done = command(plan_file.parent, "verify", str(plan_file))
    assert done.returncode == 0, done.stderr
    assert "verified: " in done.stdout


@pytest.mark.slow
def test_a_plan_of_a_changed_model_is_refused(plan_file: Path, tmp_path: Path) -> None:
    plan = load_plan(plan_file)
    stale = tmp_path / "stale.json"
    settings = {**plan.model.settings, "n_layer": 3}
    save_plan(replace(plan, model=replace(plan.model, settings=settings)), stale)
    done = command(plan_file.parent, "run", str(stale), "--steps", "1")
    assert done.returncode == 6
    assert "the plan was made for another model" in done.stderr


SCRIPT = """
import sys
import torch, autoparallel
from torch import nn

def batch():
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 8, generator=g), "y": torch.randn(8, 1, generator=g)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()

@autoparallel.parallelize(example_batch=batch(), parallel="pp=2,microbatches=2", init="exact")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layers(x))

build = lambda params: torch.optim.SGD(params, lr=0.1)
step = autoparallel.Step(Net(), loss_fn=loss_fn, build_optimizer=build)
for _ in range(3):
    sys.stdout.write(f"loss {float(step(batch())):.5f}\\n")
"""


LOOP = """
import sys
import torch, autoparallel
from torch import nn

def batch():
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 8, generator=g), "y": torch.randn(8, 1, generator=g)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.head(self.layers(x)) - y).square().mean()

torch.manual_seed(0)
options = dict(example_batch=batch(), parallel=PARALLEL)
if AS_CLASS:
    model = autoparallel.parallelize(init="exact", **options)(Net)()
else:
    model = autoparallel.parallelize(Net(), **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(**batch())
    loss.backward()
    optimizer.step()
    sys.stdout.write(f"loss {float(loss):.5f}\\n")
names = sorted(name for name, _ in model.named_parameters())
sys.stdout.write(f"names {names == sorted(name for name, _ in Net().named_parameters())}\\n")
"""


def losses_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a script printed as losses."""
    assert done.returncode == 0, done.stderr
    assert "names False" not in done.stdout
    return sorted(re.findall(r"loss ([\d.]+)", done.stdout))


def test_a_script_gives_the_same_losses_alone_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    alone = losses_of(run_python(str(script)))
    parallel = losses_of(run_python(*launcher, str(script)))
    assert len(set(alone)) == 3
    assert parallel == sorted(alone + alone)


@pytest.mark.parametrize(
    ("as_class", "parallel"),
    [
        (True, "dp=2,zero=3"),
        pytest.param(False, "tp=2", marks=pytest.mark.slow),
        pytest.param(True, "tp=2", marks=pytest.mark.slow),
        pytest.param(False, "dp=2,zero=3", marks=pytest.mark.slow),
    ],
)
def test_the_ordinary_loop_trains_a_plan_without_pipeline(
    tmp_path: Path, parallel: str, as_class: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.replace("PARALLEL", repr(parallel)).replace("AS_CLASS", str(as_class)))
    alone, together = losses_of(run_python(str(script))), losses_of(run_torchrun(script))
    assert len(set(alone)) == 3
    assert together == sorted(alone + alone)
