"""A kept capture equals a new one, and is found by what it depends on."""

from __future__ import annotations

from pathlib import Path

import kept_captures
import pytest
from kept_captures import capture_once

from autoparallel.planner.plan import Precision
from autoparallel.target.load import load_target


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_kept_capture_equals_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    target = load_target("tests/models/regression.py", {})
    batch = target.example_batch(2, None)
    monkeypatch.delenv(kept_captures.FOLDER)
    _, new = capture_once(target, batch, precision)
    monkeypatch.setenv(kept_captures.FOLDER, str(tmp_path))
    capture_once(target, batch, precision)
    monkeypatch.delattr(kept_captures, "capture_model")
    deferred, kept = capture_once(target, batch, precision)
    assert kept.graph == new.graph
    assert kept.graph.fingerprint == new.graph.fingerprint
    assert (kept.blocks, kept.dtype, kept.inputs) == (new.blocks, new.dtype, new.inputs)
    assert kept.model is deferred.model
    with pytest.raises(NameError):
        capture_once(target, target.example_batch(3, None), precision)
