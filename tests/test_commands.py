"""A forked command or script does what a started one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_python, run_torchrun

SCRIPT = """
import atexit, os, sys
atexit.register(print, "ended")
print(os.environ.get("RANK", "alone"), os.getcwd(), __name__, sys.argv[1:])
print("a line of stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("code", [0, 3])
def test_a_forked_script_does_what_a_started_one_does(script: Path, code: int) -> None:
    arguments = (str(script), str(code), "more")
    forked = run_python(*arguments, folder=script.parent)
    started = subprocess.run(
        [sys.executable, *arguments], cwd=script.parent, capture_output=True, text=True, check=False
    )
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr == started.stderr == "a line of stderr\n"


def test_a_forked_command_has_the_exit_code_and_the_words_of_its_error(tmp_path: Path) -> None:
    done = run_python("-m", "autoparallel", "plan", "absent.py", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error[AP101]: there is no file absent.py" in done.stderr


def test_an_exception_of_a_forked_script_is_shown_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("raise ValueError('no data')")
    done = run_python(str(path))
    assert done.returncode == 1
    assert "ValueError: no data" in done.stderr


def test_ranks_have_the_environment_of_torchrun_and_the_first_failure_ends_them(
    script: Path, tmp_path: Path
) -> None:
    done = run_torchrun(script, "0")
    lines = [line for line in done.stdout.splitlines() if line != "ended"]
    assert lines == [f"{rank} {os.getcwd()} __main__ ['0']" for rank in range(2)]
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(4)\ntime.sleep(1000)"
    )
    assert run_torchrun(waits).returncode == 4
