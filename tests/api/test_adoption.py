"""Ordinary scripts, adopted by one line, compute what they compute alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import adopted_scripts
import pytest
from forced_plans import settled
from kept_captures import ranks_share_captures
from processes import run_processes, set_torchrun_variables
from torch import nn

import autoparallel

TOLERANCE = 1e-5
DATA_PARALLEL = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3")
PLANS = {
    "gpt": ("dp=2,microbatches=2",),
    "stepped": ("pp=2,microbatches=4",),
    "resnet": ("tp=2",),
    "trainer": ("dp=2,zero=3,microbatches=2",),
}
"""Most scripts, and every kind of plan by one of them or in ``test_module``."""
MORE = {
    "gpt": (*DATA_PARALLEL, "tp=2", "dp=2,zero=3,microbatches=2"),
    "stepped": ("dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=1"),
    "stepped_outputs": ("pp=2,microbatches=1", "dp=2,zero=2", "tp=2"),
    "resnet": DATA_PARALLEL,
    "causal_lm": ("dp=2,zero=1", "tp=2", "dp=2,zero=3,microbatches=2"),
    "classifier": ("tp=2,microbatches=2", "dp=2,zero=2", "tp=2"),
    "trainer": ("dp=2", "tp=2"),
    "fabric": ("dp=2", "dp=2,zero=2", "tp=2"),
}
"""What is left of every script by every kind of plan that it can be trained by."""
COMPILED = {
    "gpt": ("tp=2 compiled",),
    "stepped": ("pp=2,microbatches=4 compiled",),
}


def _adopted(script: str, plans: Sequence[str], arguments: Sequence[Any]) -> dict[str, Any]:
    set_torchrun_variables()
    found = {}
    for plan in plans:

        def adopt(model: nn.Module, example: Any, plan: str = plan, **options: Any) -> nn.Module:
            parallel, _, compiled = plan.partition(" ")
            return autoparallel.parallelize(
                model,
                example_batch=example,
                global_batch=8,
                parallel=settled(parallel),
                profile="analytic",
                compile=bool(compiled),
                **options,
            )

        alone = [autoparallel.one_process()] if script in ("trainer", "fabric") else []
        with ranks_share_captures(__file__, script):
            found[plan] = getattr(adopted_scripts, script)(adopt, *arguments, *alone)
    return found


@pytest.mark.parametrize(
    ("script", "plans"),
    [pytest.param(*case, id=case[0]) for case in PLANS.items()]
    + [
        pytest.param(*case, id=f"{case[0]} {kind}", marks=pytest.mark.slow)
        for kind, cases in (("by more plans", MORE), ("compiled", COMPILED))
        for case in cases.items()
    ],
)
def test_a_script_computes_what_it_computes_alone(
    script: str, plans: Sequence[str], tmp_path: Any
) -> None:
    if script == "fabric":
        pytest.importorskip("lightning_fabric")
    arguments = [str(tmp_path)] if script in ("trainer", "fabric") else []
    expected = getattr(adopted_scripts, script)(lambda model, example, **_: model, *arguments)
    for results in run_processes(2, _adopted, script, plans, arguments):
        for plan, found in results.items():
            assert [name for name, _ in found] == [name for name, _ in expected]
            for (name, value), (_, truth) in zip(found, expected, strict=True):
                assert value == pytest.approx(truth, rel=TOLERANCE, abs=TOLERANCE), (plan, name)


def test_a_rank_writes_and_removes_checkpoints_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a checkpoint of the same name is there already, as after a restart of the trainer."""
    saved = tmp_path / "checkpoint-1"
    saved.mkdir()
    (saved / "state.json").write_text("old")
    (saved / "weights").write_bytes(bytes((1 << 20) + 1))
    monkeypatch.setenv("RANK", "0")
    assert autoparallel.own_folder(tmp_path) == str(tmp_path)
    monkeypatch.setenv("RANK", "1")
    own = Path(autoparallel.own_folder(tmp_path)) / "checkpoint-1"
    assert (own / "state.json").read_text() == "old"
    assert (own / "weights").read_bytes() == (saved / "weights").read_bytes()
    assert (own / "weights").is_symlink()
    (own / "state.json").write_text("new")
    shutil.rmtree(own)
    assert (saved / "state.json").read_text() == "old"
    assert (saved / "weights").exists()
    assert list(Path(autoparallel.own_folder(tmp_path / "none")).iterdir()) == []
