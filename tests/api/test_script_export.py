"""Scripts that plans are exported as, run without this package, equal one device's training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_torchrun
from forced_plans import settled
from handmade import flat_plan
from marks import slow
from processes import run_processes
from safetensors.torch import load_file
from script_exports import (
    GLOBAL_BATCH,
    GPT,
    RUNNER,
    SEQ,
    STEPS,
    check_text,
    exported,
    run,
    script_of,
    target_of,
)
from torch import Tensor, nn

from autoparallel.exporting.plans import export_plan
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.ops.random_ops import step_key
from autoparallel.passes.tracing.counter_random import counter_random
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import PlanError
from autoparallel.planner.plan import ServerPlan
from autoparallel.planner.plan_file import loads
from autoparallel.planning.capture import capture_program, record_target
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.update.optimizer import build_with, default_optimizer
from autoparallel.runtime.update.update import UpdateOptions
from autoparallel.runtime.verify.verify import TOLERANCE
from autoparallel.script.source import check_writable
from autoparallel.target.load import load_target
from autoparallel.target.target import Target


def one_device(
    folder: Path,
    target: Target,
    dtype: torch.dtype,
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps of the plain model, on the script's batches."""
    module = plain_build(target.build_model, 0).to(dtype)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = default_optimizer(trained)
    if target.build_optimizer is not None:
        optimizer = build_with(target.build_optimizer, module.named_parameters())
    data, losses = script_of(folder).batches(0), []
    with promote_to_float64() if dtype == torch.float64 else nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = []
            for part in range(accumulate):
                batch = {
                    key: value.to(dtype) if value.is_floating_point() else value
                    for key, value in next(data).items()
                }
                with counter_random(step_key(0, step * accumulate + part)):
                    loss = find_loss(call_model(module, batch), batch, target.loss_fn)
                (loss / accumulate).backward()
                parts.append(loss.item())
            if max_norm is not None:
                nn.utils.clip_grad_norm_(trained, max_norm)
            optimizer.step()
            losses.append(sum(parts) / len(parts))
    return losses, dict(module.state_dict())


def check_equal(
    found: tuple[list[float], dict[str, Tensor]],
    expected: tuple[list[float], dict[str, Tensor]],
    tolerance: float,
) -> None:
    losses, weights = found
    assert losses == pytest.approx(expected[0], rel=tolerance)
    assert weights.keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        largest = tensor.abs().max().item() if tensor.numel() else 0.0
        difference = (weights[name].to(tensor.dtype) - tensor).abs().max().item()
        assert difference <= tolerance * max(largest, 1e-6), name


def check_script(folder: Path, model: str, parallel: str, **options: Any) -> str:
    """A plan's script equals one device in float64; its text, without where the model lies."""
    out, target = exported(folder, model, parallel, **options)
    text = check_text(out)
    found = run(out, parallel)
    check_equal(found, one_device(out, target, torch.float64), TOLERANCE["float64"])
    return text.replace(str(folder), "")


TWO = [*map(slow, ("tp=2", "dp=2,zero=3,microbatches=2,recompute=full"))]


@pytest.mark.parametrize("parallel", [*TWO, "pp=2,microbatches=4,schedule=1f1b"])
def test_a_script_on_two_ranks_equals_one_device(tmp_path: Path, parallel: str) -> None:
    text = check_script(tmp_path, "gpt-short", parallel)
    assert max(map(len, text.splitlines())) <= 100


DATA_PARALLEL = ("dp=2,zero=1", "dp=2,zero=2,microbatches=2", "dp=4,zero=3,shard=2")
"""Plans whose script runs the model's own forward."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        *DATA_PARALLEL,
        "dp=2,recompute=selective",
        "dp=2,tp=2,zero=3,microbatches=2",
        "dp=2,cp=2,zero=2,shard=2,microbatches=2",
        "pp=4,microbatches=8,schedule=gpipe",
        "pp=2,microbatches=4,schedule=interleaved",
        "pp=2,microbatches=4,schedule=zb-h1",
        "pp=2,microbatches=4,schedule=zbv",
        "dp=2,pp=2,zero=2,microbatches=4,schedule=1f1b",
        "dp=2,tp=2,pp=2,microbatches=4,schedule=1f1b",
        "pp=2,microbatches=4,schedule=chimera",
    ],
)
def test_a_script_of_every_kind_of_plan_equals_one_device(tmp_path: Path, parallel: str) -> None:
    text = check_script(tmp_path, "gpt", parallel)
    assert max(map(len, text.splitlines())) <= 100
    assert ("ModelTrainer" in text) == (parallel in DATA_PARALLEL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("gpt-tied", "pp=2,microbatches=2,schedule=1f1b"),
        ("gpt-tied", "tp=2,pp=2,microbatches=2,schedule=1f1b"),
        ("gpt-tied", "dp=2,pp=2,zero=3,microbatches=2,schedule=1f1b"),
        ("gpt-tied", "dp=2,zero=3"),
        ("tests/models/llama", "tp=2"),
        ("tests/models/llama", "dp=2,zero=3"),
        ("tests/models/llama+r=4,alpha=8", "dp=2,pp=2,zero=2,schedule=1f1b"),
        ("tests/models/gpt2", "dp=2,tp=2"),
        *(("tests/models/mixtral", parallel) for parallel in ("dp=2,microbatches=2", "tp=2")),
        ("tests/models/mixtral", "dp=2,ep=2"),
        ("tests/models/mixtral", "dp=2,ep=2,tp=2,zero=2"),
        ("tests/models/mixtral", "dp=4,ep=2,zero=1"),
        ("examples/gshard_moe.py", "dp=4,ep=2,zero=3,shard=2"),
        ("tests/models/mixtral", "dp=4,ep=4,zero=3,microbatches=2"),
        ("tests/models/mixtral", "dp=2,ep=2,tp=2,etp=2,zero=2"),
        ("tests/zoo/gpt_oss", "tp=2,etp=2"),
        ("tests/zoo/qwen2_moe", "dp=2,ep=2"),
        ("tests/models/llama", "dp=2,cp=2,zero=3"),
        ("tests/models/llama", "cp=2,tp=2,recompute=full by ring"),
        ("gpt-short", "cp=2,zero=3,recompute=selective by ring"),
        ("window", "cp=2,recompute=selective by ring"),
        ("tests/models/gpt_dropout.py", "dp=2,microbatches=2,recompute=full"),
        ("tests/models/gpt_dropout.py", "tp=2,pp=2,microbatches=2,schedule=1f1b"),
        ("tests/models/long_skip.py", "pp=2,microbatches=2,schedule=1f1b"),
        ("tests/models/moving_average.py", "dp=2"),
        ("tests/models/moving_average.py", "dp=2,recompute=full"),
        ("tests/models/routed_experts.py", "dp=2,microbatches=2"),
        ("tests/models/masked_lm.py", "dp=2,microbatches=2"),
        ("tests/models/regression.py", "dp=2,zero=1"),
        *((f"tests/zoo/{name}", "dp=2") for name in ("resnet", "convnext")),
        *((f"tests/zoo/{name}", "tp=2") for name in ("t5", "gpt_oss")),
        ("tests/zoo/bert", "dp=2,microbatches=2"),
        ("tests/zoo/exaone4", "dp=2,cp=2"),
    ],
)
def test_a_script_of_any_model_equals_one_device(tmp_path: Path, model: str, parallel: str) -> None:
    parallel, _, way = parallel.partition(" by ")
    assert f"def {way}" in check_script(tmp_path, model, parallel, allow=tuple(way.split()))


@pytest.mark.parametrize("parallel", ["tp=2", "dp=2,zero=2,microbatches=2", slow("dp=2")])
def test_batches_are_accumulated_and_gradients_clipped_as_on_one_device(
    tmp_path: Path, parallel: str
) -> None:
    out, target = exported(tmp_path, "gpt-short", parallel)
    found = run(out, parallel, "--accumulate", "2", "--max-norm", "0.5")
    expected = one_device(out, target, torch.float64, accumulate=2, max_norm=0.5)
    check_equal(found, expected, TOLERANCE["float64"])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "zero"), [("full", 3), ("selective", 0)])
def test_a_script_recomputes_the_models_own_layers(tmp_path: Path, mode: Any, zero: int) -> None:
    """The head is not recomputed: with its loss it is no module."""
    out, target = exported(tmp_path, "gpt-short", f"dp=2,zero={zero}")
    plan = loads((tmp_path / "plan.json").read_text(), "test")
    (stage,) = plan.stages
    blocks = tuple(
        replace(b, recompute=mode if b.kind == "layers" else "none") for b in stage.blocks
    )
    changed = replace(plan, stages=(replace(stage, blocks=blocks),))
    save_plan(changed, tmp_path / "changed.json")
    export_plan(tmp_path / "changed.json", tmp_path / "again", to="python", trust=True)
    text = check_text(tmp_path / "again")
    assert 'for name in [*(f"layers.{i}" for i in range(2))]:' in text
    found = run(tmp_path / "again", "dp=2")
    check_equal(found, one_device(out, target, torch.float64), TOLERANCE["float64"])


@pytest.mark.slow
def test_torchrun_starts_a_script_where_this_package_cannot_be_imported(tmp_path: Path) -> None:
    """In interpreters of their own: nothing of this package was ever imported there."""
    out, _ = exported(tmp_path, "gpt", "dp=2,zero=2,microbatches=2")
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import sys\nsys.path.insert(0, " + repr(str(RUNNER.parent)) + ")\n"
        "from exported_script import Refusal\nsys.meta_path.insert(0, Refusal())\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            str(out / "train.py"),
            "--steps",
            "2",
        ],
        env={**os.environ, "PYTHONPATH": str(blocked)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2  loss" in done.stdout
    refused = subprocess.run(
        [sys.executable, "-c", "import autoparallel"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(blocked)},
        text=True,
        check=False,
    )
    assert "a script imports autoparallel" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parallel", ["dp=2,zero=1,microbatches=2", "tp=2", "dp=2,zero=3"])
def test_a_script_in_half_precision_trains_as_the_runtime_does(
    tmp_path: Path, precision: str, parallel: str
) -> None:
    """Of the same plan: what differs is the order in which gradients are summed."""
    out, _ = exported(tmp_path, "gpt", parallel, precision=precision)
    check_text(out)
    losses, weights = run(out, parallel)
    plan = (tmp_path / "plan.json").read_text()
    expected = run_processes(2, runtime_losses, plan, str(out))[0]
    assert losses == pytest.approx(expected, rel=2e-3)
    assert all(each.dtype == torch.float32 for each in weights.values())


def runtime_losses(text: str, folder: str) -> list[float]:
    """On a rank: the losses of the steps of a plan, on a script's batches."""
    plan, target = loads(text, "test"), target_of("gpt", Path(folder).parent)
    deferred = record_target(target)
    program = capture_program(
        target,
        deferred,
        global_batch=GLOBAL_BATCH,
        seq=SEQ,
        precision=plan.model.precision,
        autocast=True,
    )
    trainer = Trainer(
        program, plan, deferred, device=torch.device("cpu"), build=target.build_optimizer
    )
    trainer.use_update(UpdateOptions())
    data = script_of(Path(folder)).batches(0)
    return [float(trainer.step(next(data)).loss) for _ in range(STEPS)]


def test_a_script_goes_on_from_weights(tmp_path: Path) -> None:
    """Whole tensors that another script saved, as safetensors too."""
    out, _ = exported(tmp_path, "gpt-tied", "pp=2,microbatches=2,schedule=1f1b")
    _, saved = run(out, "pp=2")
    for ending in ("pt", "safetensors"):
        kept = tmp_path / f"kept.{ending}"
        done = run_torchrun(
            RUNNER,
            str(out / "train.py"),
            "--steps",
            "0",
            "--weights",
            str(out / "saved.pt"),
            "--save",
            str(kept),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = torch.load(kept) if ending == "pt" else load_file(kept)
        assert found.keys() <= saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in found)


def test_the_documents_excerpt_is_what_an_export_writes(tmp_path: Path) -> None:
    parallel = "dp=2,zero=2,recompute=full"
    settings = {"n_layer": 2, "d_model": 32, "seq": SEQ}
    target = load_target("examples/gpt.py", settings)
    asked = PlanOptions(global_batch=8, seq=SEQ, forced=parse_parallel(parallel))
    save_plan(make_plan(target, "cpu:2", asked), tmp_path / "plan.json")
    export_plan(tmp_path / "plan.json", tmp_path / "out", to="python")
    text = (tmp_path / "out" / "train.py").read_text()
    document = Path("docs/export.md").read_text()
    found = re.search(r"```text\n(def layer.*?)```", document, re.DOTALL)
    assert found is not None
    parts = found[1].split("\n\n\n")
    assert len(parts) == 2
    assert all(part.strip() in text for part in parts)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"offload": "optimizer"}, "masters and optimizer states in host memory"),
        ({"slices": (8, 8)}, "slices of the sequences"),
        ({"servers": ServerPlan((0, 1), (0,), (1, 1))}, "parameter servers"),
    ],
)
def test_a_plan_that_a_script_cannot_run_is_refused(change: dict[str, Any], what: str) -> None:
    check_writable(flat_plan())
    with pytest.raises(PlanError, match=what) as error:
        check_writable(replace(flat_plan(), **change))
    assert error.value.code == "AP366"


MODEL = """
import torch
{imports}

def build_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

def example_batch(global_batch):
    return {{"input": torch.empty(global_batch, 4, device="meta")}}

def loss_fn(outputs, batch):
    return outputs.square().mean()

def build_optimizer(parameters):
    return torch.optim.{optimizer}
"""


SCHEDULER = """
def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.{scheduler}
"""


@pytest.mark.parametrize(
    "scheduler",
    [slow("StepLR(optimizer, 1, 0.5)"), "ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)"],
)
def test_a_script_steps_the_targets_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """The rate falls as on one device: after the first update, or when the loss no longer falls."""
    monkeypatch.chdir(tmp_path)
    text = MODEL.format(imports="", optimizer="SGD(parameters, lr=0.1)")
    name = f"scheduled_{scheduler.partition('(')[0]}.py"
    Path(name).write_text(text + SCHEDULER.format(scheduler=scheduler))
    out, target = exported(tmp_path, name, "dp=2,zero=2")
    check_text(out)
    losses, weights = run(out, "dp=2")
    module = plain_build(target.build_model, 0).double()
    assert target.build_optimizer is not None
    assert target.build_scheduler is not None
    optimizer = target.build_optimizer(list(module.parameters()))
    schedule, data = target.build_scheduler(optimizer), script_of(out).batches(0)
    for expected in losses:
        loss = module(next(data)["input"].double()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(*[loss.item()] * scheduler.startswith("Reduce"))
        assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert optimizer.param_groups[0]["lr"] < 0.1
    check_equal(([], weights), ([], dict(module.state_dict())), TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("made", "error"),
    [
        # At the end of data that the batch does not divide: its mean would be of unequal parts.
        ("torch.ones(6, 4)", "a batch has input of shape (6, 4), not (8, 4)"),
        # Of a generator that nothing seeds: ranks would mix rows of different batches.
        ("torch.ones(8, 4) * (1 + int(os.environ['RANK']))", "the ranks have different batches"),
    ],
)
def test_a_script_refuses_batches_that_are_not_one_global_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = MODEL.format(imports="import os", optimizer="SGD(parameters, 0.1)")
    data = f"\ndef build_data(rank, world):\n    yield {{'input': {made}}}\n"
    Path("data.py").write_text(text + data)
    out, _ = exported(tmp_path, "data.py", "dp=2")
    done = run_torchrun(RUNNER, str(out / "train.py"), "--steps", "1")
    assert done.returncode != 0
    assert error in done.stderr


@pytest.mark.parametrize("name", [slow("constants.py"), "own model.py", slow("train.py")])
def test_a_model_file_of_any_name_is_imported_with_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("its_helper.py").write_text("RATE = 0.5\n")
    text = MODEL.format(imports="import its_helper", optimizer="SGD(parameters, its_helper.RATE)")
    Path(name).write_text(text)
    asked = PlanOptions(global_batch=8, forced=parse_parallel("dp=2"))
    save_plan(make_plan(load_target(name), "cpu:2", asked), tmp_path / "plan.json")
    export_plan(tmp_path / "plan.json", tmp_path / "out", to="python")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert "its_helper.py" in files
    script = "train_by_plan.py" if "train_by_plan.py" in files else "train.py"
    found = run_torchrun(RUNNER, str(tmp_path / "out" / script), "--steps", "1")
    assert found.returncode == 0, found.stderr[-2000:]
    assert "step 1  loss" in found.stdout


@pytest.mark.parametrize(
    ("imports", "optimizer", "code"),
    [
        ("", "Adafactor(parameters)", "AP368"),
        ("import autoparallel", "SGD(parameters, lr=0.1)", "AP366"),
    ],
)
def test_a_model_file_that_a_script_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str, optimizer: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"refused_{code}.py"
    Path(name).write_text(MODEL.format(imports=imports, optimizer=optimizer))
    asked = PlanOptions(global_batch=8, forced=parse_parallel("dp=2,zero=1"))
    save_plan(make_plan(load_target(name), "cpu:2", asked), tmp_path / "plan.json")
    with pytest.raises(PlanError) as error:
        export_plan(tmp_path / "plan.json", tmp_path / "out", to="python")
    assert error.value.code == code
    assert not (tmp_path / "out").exists()


OWN_OPTIMIZER = """

class Own(torch.optim.SGD):
    pass

def build_optimizer(parameters):
    return {optimizer}
"""


@pytest.mark.parametrize(
    ("optimizer", "is_refused"),
    [("Own(parameters, lr=0.1)", True), slow("torch.optim.Adafactor(parameters)", False)],
)
def test_an_optimizer_that_may_read_all_weights_is_refused_beside_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, is_refused: bool
) -> None:
    """Of a class of the user's that is not known; Adafactor reads whole weights, one by one."""
    text = Path("examples/gpt.py").read_text() + OWN_OPTIMIZER.format(optimizer=optimizer)
    monkeypatch.chdir(tmp_path)
    name = f"own_{is_refused}.py"
    Path(name).write_text(text)
    target = load_target(name, {**GPT, "n_layer": 2})
    forced = parse_parallel(settled("pp=2,microbatches=2"))
    asked = PlanOptions(global_batch=8, seq=SEQ, forced=forced)
    save_plan(make_plan(target, "cpu:2", asked), tmp_path / "plan.json")
    with pytest.raises(PlanError, match="AP368") if is_refused else nullcontext():
        export_plan(tmp_path / "plan.json", tmp_path / "out", to="python")
