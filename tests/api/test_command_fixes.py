"""Errors that a command meets: each wrong command line runs, and then the one that its fix names.

The tables of cases are the modules of ``tests/support`` whose names end in ``mistakes``.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import checkpoint_mistakes
import file_mistakes
import model_mistakes
import option_mistakes
import planning_mistakes
import pytest
import run_mistakes
from brief_search import searches_are_brief
from command_cases import CHECKPOINTS, FILES, PLANS, Case
from finetuned_models import save_llama, save_tokenizer, words

from autoparallel import __main__ as cli

TABLES = (
    planning_mistakes,
    option_mistakes,
    model_mistakes,
    file_mistakes,
    run_mistakes,
    checkpoint_mistakes,
)
CASES = [case for table in TABLES for case in table.CASES]


def run(line: str) -> int:
    """The exit code of a command line, run in this process with a brief search."""
    with searches_are_brief():
        return cli.run_command(shlex.split(line.removeprefix("autoparallel ")))


def write(files: Mapping[str, str | Path | None]) -> None:
    """Write files by their names in the current folder, move them there, or remove them."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            Path(name).unlink()
        elif isinstance(text, Path):
            text.rename(name)
        else:
            Path(name).write_text(text)


class Prepared:
    """A folder with what cases begin with; each plan and checkpoint is made when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write({str(folder / name): text for name, text in FILES.items()})
        self.succeeded: set[object] = set()

    def work(self, case: Case) -> Path:
        """Make the folder of a case: the same for all, so that they share captures."""
        to = self.folder / "work"
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        for name in FILES:
            shutil.copy(self.folder / name, to / name)
        for name in ("llama", *PLANS, *CHECKPOINTS):
            if case.mentions(name):
                made = self._made(name)
                (shutil.copytree if made.is_dir() else shutil.copy)(made, to / name)
        return to

    def _made(self, name: str) -> Path:
        """The plan, checkpoint or model of this name."""
        place = self.folder / name
        if place.exists():
            return place
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            if name == "llama":
                save_llama(place, vocabulary=300)
                save_tokenizer(place, words())
            elif name in PLANS:
                self._made("llama")
                assert run(f"plan {PLANS[name]} -o {name}") == 0
            else:
                self._made(CHECKPOINTS[name].split()[0].removeprefix("hf:"))
                assert run(f"run {CHECKPOINTS[name]}") == 0
        return place


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(autouse=True)
def _modules_of_a_case(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules that a case has loaded from its folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(prepared.folder)):
            del sys.modules[name]


def advice_of(told: str) -> str:
    """The fix of a printed error; where it has none, the whole error."""
    error = told[told.index("error[") :]
    return error.partition("\n  fix: ")[2] or error


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case.code} {case.wrong}", marks=[] if case.is_quick else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_the_command_line_that_follows_an_error_s_fix_runs(
    case: Case,
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(prepared.work(case))
    write(case.files)
    for line in case.before:
        assert run(line) == 0, capfd.readouterr().err
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in case.variables.items():
            patch.setenv(name, value)
        code = run(case.wrong)
    told = capfd.readouterr().err
    assert f"error[{case.code}]" in told, told
    assert code == case.exit_code
    found = re.search(case.advice, advice_of(told), re.DOTALL)
    assert found is not None, told
    write(case.mended)
    right = case.right.format(*found.groups())
    state = {**case.files, **case.mended}
    key = right, repr({k: v for k, v in state.items() if v != FILES.get(k)}), case.before
    if key in prepared.succeeded:  # the same lines with the same files
        return
    for line in right.split(" && "):
        assert run(line) == 0, capfd.readouterr().err
    prepared.succeeded.add(key)
