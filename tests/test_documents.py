"""The documents' commands and snippets run, and the site is complete."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import documents
import pytest
from commands import run_python
from documents import DOCUMENTS, NOT_RUN, ROOT, blocks, left_out, run_document

SITE = ROOT / "docs/site"


def marked(*, is_slow: bool) -> list[str]:
    """The documents with blocks that run: all that have slow ones, or those with quick ones."""
    return [
        document
        for document in DOCUMENTS
        if any(
            block.mark is not None
            and block.is_slow == is_slow
            and not block.mark.startswith("write")
            for block in blocks(document)
        )
    ]


def test_every_command_and_snippet_runs_or_is_left_out_for_a_reason() -> None:
    in_marked = {
        (block.document, part)
        for document in DOCUMENTS
        for block in blocks(document)
        if block.mark is not None
        for part in block.parts
    }
    unexplained = left_out() - NOT_RUN.keys()
    assert unexplained == set()
    stale = NOT_RUN.keys() - left_out() - in_marked
    assert stale == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_not_run_can_be_read(document: str) -> None:
    """Snippets are Python, and commands have only options that there are."""
    import typer.main

    from autoparallel.__main__ import app
    from autoparallel.commands.help import leaf_commands

    commands = leaf_commands(typer.main.get_command(app))
    for block in blocks(document):
        if block.language == "python":
            compile(block.text, document, "exec")
        for command in block.commands:
            words = shlex.split(command.rpartition("&& ")[2])
            if words[0] == "torchrun" and "-m" in words:
                words = words[words.index("-m") + 1 :]
            if words[0] == "autoparallel":
                name = " ".join(words[1 : 3 if words[1] == "show" else 2])
                commands[name].make_context(name, words[1 + len(name.split()) :])


def test_an_option_that_does_not_exist_is_noticed() -> None:
    import typer.main

    from autoparallel.__main__ import app
    from autoparallel.commands.help import leaf_commands

    commands = leaf_commands(typer.main.get_command(app))
    with pytest.raises(Exception, match="No such option"):
        commands["plan"].make_context("plan", ["model.py", "--no-such-option"])


@pytest.mark.parametrize("document", marked(is_slow=False))
def test_quick_blocks_run(document: str, tmp_path: Path) -> None:
    assert run_document(document, tmp_path, with_slow=False) > 0


@pytest.mark.slow
def test_the_first_command_of_the_readme_verifies_trains_and_compares(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    first = text.split("pip install -c constraints.txt -e . && autoparallel ")[1].split("\n")[0]
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/gpt.py", tmp_path / "examples")
    done = run_python("-m", "autoparallel", *shlex.split(first), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("verification, then 50 steps", "verified: ", "step time  measured ", "--save"):
        assert words in done.stdout
    losses = re.search(r"^loss +([\d.]+) to ([\d.]+) in 50 steps", done.stdout, re.MULTILINE)
    assert losses is not None
    assert float(losses[2]) < 0.7 * float(losses[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", marked(is_slow=True))
def test_all_marked_blocks_run(document: str, tmp_path: Path) -> None:
    assert run_document(document, tmp_path, with_slow=True) > 0


def test_a_block_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.md"
    own.write_text("<!-- run -->\n```\nautoparallel show schedules no-such-schedule\n```\n")
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "examples").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError, match="AP150"):
        run_document("own.md", folder, with_slow=False)


@pytest.fixture(scope="module")
def references() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        return importlib.import_module("references")


def test_the_reference_of_commands_has_every_option(references: ModuleType) -> None:
    import typer.main

    from autoparallel.__main__ import app
    from autoparallel.commands.help import leaf_commands

    page = references.commands_page()
    commands = leaf_commands(typer.main.get_command(app))
    for name, command in commands.items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        listed, _, as_for_plan = section.partition("- As for [plan](#plan): ")
        options = [each for each in command.params if each.name != "help"]
        assert listed.count("\n- `") + as_for_plan.count("`") // 2 == len(options)
        for option in options:
            names = [each for each in option.opts if each.startswith("--")]
            assert all(f"`{each}`" in section for each in names)
    assert "`--global-batch` `INTEGER`" in page or "`--global-batch` `GLOBAL_BATCH`" in page


def test_an_option_of_planning_is_listed_where_a_command_has_its_own_default(
    references: ModuleType,
) -> None:
    sections = references.commands_page().split("\n## ")
    (verify,) = (section for section in sections if section.startswith("verify\n"))
    listed, referred = verify.split("- As for [plan](#plan): ")
    assert "- `--global-batch`" in listed
    assert "`--global-batch`" not in referred
    assert "`--max-tp`" in referred


def test_the_committed_references_are_what_the_code_generates(references: ModuleType) -> None:
    """``make references`` writes them again."""
    for name, page in references.COMMITTED.items():
        text = (ROOT / "docs" / name).read_text()
        assert text == page(), f"docs/{name} is older than the code: make references"
        assert text.startswith("<!-- Generated")


def test_the_reference_of_commands_has_every_field_of_their_json(references: ModuleType) -> None:
    from autoparallel.agents.documents import RESULTS, document_schema

    page = references.commands_page().split("\n## JSON\n")[1]
    for name in RESULTS:
        assert f"| `autoparallel.{name}/1` |" in page
        classes = document_schema(name)["$defs"]
        if not set(references.OF_PLANS) & set(classes):
            for own, schema in classes.items():
                section = page.split(f"\n### {own}\n")[1].split("\n### ")[0]
                assert all(f"| `{field}` |" in section for field in schema["properties"])


def test_the_reference_of_errors_has_messages_of_every_code(references: ModuleType) -> None:
    errors = references.read_errors(ROOT)
    assert all(messages for error in errors.values() for messages in error.messages)
    assert errors["AP190"].class_name == "UsageError"
    assert errors["AP802"].class_name == "HangError"
    assert errors["AP504"].messages[0] == "… is not of type …"


def test_the_reference_of_plans_has_every_field(references: ModuleType) -> None:
    from autoparallel.cost_model.cluster.cluster import Host
    from autoparallel.planner.plan import Plan, StagePlan

    page = references.plan_page()
    assert {Plan, StagePlan, Host} <= set(references.classes_of(Plan))
    for kind in references.classes_of(Plan):
        section = page.split(f"\n## {kind.__name__}\n")[1].split("\n## ")[0]
        assert all(f"| `{each.name}` |" in section for each in dataclasses.fields(kind))


def test_the_reference_of_devices_has_every_source(references: ModuleType) -> None:
    from autoparallel.cost_model.cluster.presets import device_presets, link_presets

    page = references.devices_page()
    for name, preset in device_presets().items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        shown = {"host_memory_bytes", "peak_flops", "num_units", "efficiency.matmul"}
        for field in shown & set(preset.device.sources):
            assert preset.device.sources[field] in section, (name, field)
    assert all(f"\n## {name}\n" in page for name in link_presets())


def test_every_document_is_in_the_site(references: ModuleType) -> None:
    nav = set(re.findall(r": ((?:docs|benchmarks)/\S+\.md)", (SITE / "mkdocs.yml").read_text()))
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert own - nav == set()
    made = {"docs/plan_schema.md", "docs/devices.md"}
    assert {name for name in nav - made if not (ROOT / name).exists()} == set()


def test_the_sources_of_the_site_are_whole(
    references: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every link between collected documents leads to a collected file."""
    monkeypatch.syspath_prepend(str(SITE))
    build = importlib.import_module("build")
    build.collect(tmp_path)
    for path in tmp_path.rglob("*.md"):
        if (ROOT / path.relative_to(tmp_path)).exists():
            for target in build.linked(ROOT / path.relative_to(tmp_path)):
                assert (tmp_path / target.relative_to(ROOT)).exists(), (path, target)


@pytest.mark.slow
def test_the_site_builds_without_a_warning() -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, str(SITE / "build.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build/site/html/docs/cli.html").exists()
