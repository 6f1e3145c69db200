"""Which format is made of what."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import flat_plan

from autoparallel.__main__ import run_command
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.exporting.plans import (
    CHECKPOINT_FORMATS,
    WRITERS,
    export_plan,
    is_plan_format,
    torchrun,
)
from autoparallel.planner.errors import UsageError
from autoparallel.planning.plan_files import save_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    save_plan(flat_plan(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_format_decides_what_is_exported(plan_file: Path, tmp_path: Path) -> None:
    assert all(is_plan_format(name, plan_file) for name in WRITERS)
    assert not any(is_plan_format(name, tmp_path) for name in CHECKPOINT_FORMATS)
    assert not is_plan_format(None, tmp_path)


@pytest.mark.parametrize("to", [None, "hf"])
def test_a_plan_is_no_checkpoint(to: str | None, plan_file: Path) -> None:
    with pytest.raises(UsageError, match="AP361") as error:
        is_plan_format(to, plan_file)
    assert "megatron" in error.value.fix


def test_an_index_of_weights_is_a_checkpoint(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    assert not is_plan_format("hf", index)


def test_an_unknown_format_names_the_nearest(plan_file: Path) -> None:
    with pytest.raises(UsageError, match="AP870") as error:
        is_plan_format("megatorn", plan_file)
    assert error.value.fix == "did you mean megatron?"


def test_a_checkpoint_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(UsageError, match="AP362"):
        export_plan(tmp_path / "step-00000003", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_plan_is_a_plan(plan_file: Path, tmp_path: Path) -> None:
    assert export_plan(tmp_path, tmp_path / "out", to="megatron").files


def test_the_command_of_several_hosts_names_their_devices() -> None:
    same = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 4"
    assert torchrun(parse_cluster("1x4xH100")) == "torchrun --nproc-per-node 4"
    assert torchrun(parse_cluster("2x4xH100")) == same
    assert torchrun(parse_cluster("1x4xH100+1x8xH100")).endswith("--nproc-per-node DEVICES")


@pytest.mark.parametrize("place", [".", "..", "{}"])
@pytest.mark.parametrize("force", [False, True])
def test_the_current_folder_is_not_replaced(
    place: str, force: bool, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = tmp_path / "around" / "here"
    current.mkdir(parents=True)
    monkeypatch.chdir(current)
    with pytest.raises(UsageError, match="AP869"):
        export_plan(plan_file, place.format(current), to="megatron", force=force)
    assert current.is_dir()


def test_options_of_weights_are_refused_with_a_plan(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(plan_file), "--to", "megatron", "-o", str(tmp_path / "out")]
    assert run_command([*command, "--dtype", "bf16"]) == 2
    assert "AP363" in capsys.readouterr().err
    assert run_command(command) == 0
    assert run_command(command) == 2
    assert "AP869" in capsys.readouterr().err
