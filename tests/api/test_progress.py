"""Progress of functions of the Python API: bars where someone watches, nothing in logs."""

from __future__ import annotations

import sys

import pytest

from autoparallel.options.progress import in_notebook, progress, shown_to_callers, ticking


def shown_text(capsys: pytest.CaptureFixture[str], wanted: bool = True) -> str:
    with shown_to_callers(wanted) as observe:
        observe("capture", 0, 1)
        observe("capture", 1, 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_terminal_gets_bars_unless_none_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "capture" in shown_text(capsys)
    assert shown_text(capsys, wanted=False) == ""


def test_a_log_and_a_rank_of_torchrun_get_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not in_notebook()
    assert shown_text(capsys) == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert shown_text(capsys) == ""


def test_seconds_that_pass_end_with_the_block() -> None:
    seen: list[tuple[float, float]] = []
    with ticking(lambda _, done, total: seen.append((done, total)), "measuring", 10.0):
        pass
    assert seen[0] == (0, 10.0)
    assert seen[-1] == (10.0, 10.0)


def test_a_phase_that_begins_again_is_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as observe:
        for done in (0, 1, 0, 1):
            observe("search", done, 1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("autoparallel: search 0.0 s") for line in lines)
