"""Each rank starts from its own boxes of the tensors in files, and reads nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetuned_models import save_llama
from marks import slow
from processes import run_processes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autoparallel
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import Region
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_program, record_target
from autoparallel.runtime.checkpoint.weight_files import WeightFiles
from autoparallel.runtime.parameters.pretrained import load_pretrained, open_pretrained
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target


class Counting:
    """Files that count the bytes that are read of them."""

    def __init__(self, files: WeightFiles) -> None:
        self.files, self.num_bytes, self.place = files, 0, files.place

    def read(self, name: str, region: Region) -> Tensor:
        part = self.files.read(name, region)
        self.num_bytes += part.nbytes
        return part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)


def _start(plan_text: str, weights: str) -> tuple[int, int, bool]:
    """The bytes that this rank read, those that it holds, and whether it holds the file's."""
    plan = loads(plan_text)
    target = load_target(plan.model.target, plan.model.settings)
    deferred = record_target(target)
    program = capture_program(
        target, deferred, global_batch=plan.model.global_batch, seq=plan.model.seq, precision="fp32"
    )
    start = open_pretrained(weights, program.model, deferred)
    counted = Counting(start.files)
    object.__setattr__(start, "files", counted)
    trainer = Trainer(program, plan, start, device=torch.device("cpu"))
    held = sum(parameter.local.nbytes for parameter in trainer.model.all_parameters())
    expected = load_file(weights)
    is_right = all(
        torch.equal(p.local, expected[name][tuple(slice(*bounds) for bounds in p.region)])
        for name, p in trainer.model.parameters.items()
    )
    return counted.num_bytes, held, is_right


@pytest.mark.parametrize("parallel", [slow("tp=2"), slow("dp=2,zero=3"), "pp=2,microbatches=2"])
def test_a_rank_reads_as_many_bytes_as_it_holds(tmp_path: Path, parallel: str) -> None:
    folder = save_llama(tmp_path / "llama")
    plan = autoparallel.plan(
        f"hf:{folder}",
        cluster="cpu:2",
        global_batch=4,
        seq=16,
        parallel=parallel,
        profile="analytic",
        stage_at=("model.layers.1",) if parallel.startswith("pp") else (),
    )
    file = folder / "model.safetensors"
    whole = sum(tensor.nbytes for tensor in load_file(file).values())
    for num_read, num_held, is_right in run_processes(2, _start, dumps(plan), str(file)):
        assert is_right
        assert num_read == num_held < 0.8 * whole


class Small(nn.Module):
    """A parameter, a tied one, and buffers that are kept and not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.ones(2), persistent=False)


def stored(**changes: Tensor) -> dict[str, Tensor]:
    """What a file of ``Small`` holds, with one name of the tied weights."""
    torch.manual_seed(1)
    return {
        "first.weight": torch.randn(4, 3),
        "norm.weight": torch.randn(4),
        "norm.bias": torch.randn(4),
        "norm.running_mean": torch.randn(4),
        "norm.running_var": torch.rand(4),
        "norm.num_batches_tracked": torch.tensor(9),
    } | changes


def test_parameters_and_buffers_are_taken_and_cast(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in stored().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    model = Small()
    load_pretrained(tmp_path / "w.safetensors", model)
    for name, tensor in model.state_dict().items():
        expected = tensors[name.replace("second", "first")]
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert model.first.weight is model.second.weight
    assert model.first.weight.dtype == torch.float32


def test_one_error_lists_all_that_differs(tmp_path: Path) -> None:
    tensors = stored(**{"norm.bias": torch.zeros(5), "extra.weight": torch.zeros(1)})
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(UsageError) as raised:
        load_pretrained(tmp_path / "w.safetensors", Small())
    text = str(raised.value)
    assert raised.value.code == "AP862"
    assert "Small" in text
    assert "w.safetensors" in text
    assert "1 missing in the file: norm.weight" in text
    assert "1 not in the model: extra.weight" in text
    assert "1 of another shape: norm.bias (5,) in the file, (4,) in the model" in text
    with pytest.raises(UsageError, match="1 of another shape"):
        load_pretrained(tmp_path / "w.safetensors", Small(), partial=True)


def test_with_partial_missing_tensors_keep_their_values(tmp_path: Path) -> None:
    tensors = stored(extra=torch.zeros(1))
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "w.safetensors")
    model = Small()
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    found = load_pretrained(tmp_path / "w.safetensors", model, partial=True)
    assert torch.equal(model.norm.weight, torch.full((4,), 3.0))
    assert torch.equal(model.norm.bias, tensors["norm.bias"])
    assert "norm.weight" in found.summary()
    assert "extra" in found.summary()


def test_weights_of_another_model_are_refused_even_in_part(tmp_path: Path) -> None:
    save_file({"nothing.like": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match="AP862"):
        load_pretrained(tmp_path / "w.safetensors", Small(), partial=True)


def test_many_names_are_counted_and_a_few_of_them_listed(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    other = {name: t for name, t in load_file(folder / "model.safetensors").items() if "0" in name}
    save_file(other, tmp_path / "w.safetensors")
    target = load_target(f"hf:{folder}")
    with pytest.raises(UsageError, match=r"12 missing in the file: .* and 7 more"):
        open_pretrained(tmp_path / "w.safetensors", record_target(target).model, {})
