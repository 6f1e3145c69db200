"""One writer of a folder of checkpoints: claims of live and ended processes, here and elsewhere."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from commands import run_python

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.checkpoint import writer_claim
from autoparallel.runtime.checkpoint.writer_claim import CLAIM, STOPPED_SECONDS, claim_folder

HOLD = """
import sys, time
from autoparallel.runtime.checkpoint.writer_claim import claim_folder
end = claim_folder(sys.argv[1])
print("claimed", flush=True)
if len(sys.argv) > 2:
    end()
"""


def claimed_elsewhere(folder: Path, *, seconds_ago: float) -> None:
    (folder / CLAIM).write_text(json.dumps({"host": "another", "process": 1, "started": 0.0}))
    then = time.time() - seconds_ago
    os.utime(folder / CLAIM, (then, then))


def test_a_live_process_keeps_others_out_until_it_ends_its_claim(tmp_path: Path) -> None:
    end = claim_folder(tmp_path)
    held = (tmp_path / CLAIM).read_text()
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    refused = run_python(str(script), str(tmp_path))
    assert f"process {os.getpid()} on" in refused.stderr
    assert "AP892" in refused.stderr
    assert (tmp_path / CLAIM).read_text() == held
    end()
    assert not (tmp_path / CLAIM).exists()
    assert run_python(str(script), str(tmp_path)).returncode == 0


def test_the_claim_of_an_ended_process_on_this_host_is_taken_at_once(tmp_path: Path) -> None:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    assert run_python(str(script), str(tmp_path)).stdout == "claimed\n"
    assert (tmp_path / CLAIM).exists()
    claim_folder(tmp_path)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hold.py"]


def test_a_claim_on_another_host_ends_when_it_is_not_renewed(tmp_path: Path) -> None:
    claimed_elsewhere(tmp_path, seconds_ago=STOPPED_SECONDS / 2)
    with pytest.raises(UsageError, match="AP892") as refused:
        claim_folder(tmp_path)
    assert "another" in refused.value.why
    claimed_elsewhere(tmp_path, seconds_ago=STOPPED_SECONDS + 5)
    claim_folder(tmp_path)()


def test_a_restart_takes_over_the_claim_of_its_run(tmp_path: Path) -> None:
    claimed_elsewhere(tmp_path, seconds_ago=0)
    claim_folder(tmp_path, takes_over=True)()
    assert not (tmp_path / CLAIM).exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"host": 3}', "\udcff"])
def test_a_damaged_claim_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / CLAIM).write_bytes(text.encode("utf-8", "surrogateescape"))
    then = time.time() - 2 * STOPPED_SECONDS
    os.utime(tmp_path / CLAIM, (then, then))
    claim_folder(tmp_path)()


def test_a_claim_is_renewed_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_claim, "RENEW_SECONDS", 0.01)
    end = claim_folder(tmp_path)
    try:
        os.utime(tmp_path / CLAIM, (0, 0))
        deadline = time.monotonic() + 20
        while not (tmp_path / CLAIM).stat().st_mtime and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / CLAIM).stat().st_mtime > 0
    finally:
        end()
