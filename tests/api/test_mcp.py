"""``autoparallel mcp``: its tools by the protocol's own client, and the skill for agents."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from jsonschema import Draft202012Validator

from autoparallel.__main__ import run_command
from autoparallel.actions import mcp as server
from autoparallel.agents.documents import document_schema
from autoparallel.options.option import declared
from autoparallel.options.plan_options import PlanOptions

mcp = pytest.importorskip("mcp")
import anyio  # noqa: E402 - a dependency of mcp

SMALL = {"target": "model.py", "cluster": "cpu:2", "global_batch": 8}


def talk(folder: Path, said: Callable[[Any], Awaitable[None]]) -> str:
    """Have a conversation with a server in ``folder``; what the server wrote to stderr."""

    async def run(errors: Any) -> None:
        environment = {**os.environ, "AUTOPARALLEL_CACHE": str(folder / "cache")}
        command = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "autoparallel", "mcp"],
            cwd=str(folder),
            env=environment,
        )
        async with (
            mcp.stdio_client(command, errlog=errors) as streams,
            mcp.ClientSession(*streams) as session,
        ):
            await session.initialize()
            await said(session)

    with (folder / "errors.txt").open("w") as errors:
        anyio.run(run, errors)
    return (folder / "errors.txt").read_text()


def document(result: Any) -> dict[str, Any]:
    """The document of a result, which is the same as text and as a structure."""
    (content,) = result.content
    assert json.loads(content.text) == result.structured_content
    found: dict[str, Any] = result.structured_content
    return found


def test_every_tool_answers_as_its_command_does(model_file: Path) -> None:
    """The client checks each result against the schema that the server states."""
    model_file.write_text("print('printed by the file')\n" + model_file.read_text())

    async def said(session: Any) -> None:
        listed = {each.name: each for each in (await session.list_tools()).tools}
        assert set(listed) == {"plan", "estimate", "simulate", "explain", "compare"}
        assert [name for name, each in listed.items() if not each.annotations.read_only_hint] == [
            "plan",
            "simulate",
        ]
        planned = document(
            await session.call_tool("plan", {**SMALL, "parallel": "dp=2", "output": "plan.json"})
        )
        file = json.loads((model_file.parent / "plan.json").read_text())
        assert planned == {"schema": "autoparallel.plan/1", "result": file}
        estimated = document(
            await session.call_tool("estimate", {"target": "model.py", "devices": "1xT4"})
        )
        assert [each["fits"] for each in estimated["result"]] == [True]
        simulated = document(await session.call_tool("simulate", {**SMALL, "parallel": "dp=2"}))
        assert simulated["result"]["configuration"]["dp"] == 2
        explained = document(
            await session.call_tool("explain", {"plan": "plan.json", "name": "zero"})
        )
        assert explained["result"]["alternatives"]
        compared = document(await session.call_tool("compare", {"items": ["plan.json", "ddp"]}))
        assert [each["name"] for each in compared["result"]] == ["plan.json", "ddp"]

    errors = talk(model_file.parent, said)
    assert "printed by the file" in errors
    assert "Traceback" not in errors


def test_a_repeated_question_is_answered_from_the_cache_until_a_file_changes(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stays reads the files of a model again, those that it imports too."""
    monkeypatch.chdir(model_file.parent)
    monkeypatch.setenv("AUTOPARALLEL_CACHE", str(model_file.parent / "cache"))
    text = model_file.read_text()
    helper = model_file.parent / "own_sizes.py"
    helper.write_text("DEPTH = 2\n")
    model_file.write_text(text.replace("range(depth)", "range(own_sizes.DEPTH)"))
    model_file.write_text("import own_sizes\n" + model_file.read_text())

    def ask() -> tuple[int, bool]:
        found, is_error = server.answer("plan", {**SMALL, "measure_seconds": 0.0})
        assert not is_error, found
        plan = found["result"]
        return plan["model"]["num_parameters"], plan["solver"]["is_reused"]

    assert ask() == (2 * (8 * 8 + 8), False)
    assert ask() == (2 * (8 * 8 + 8), True)
    helper.write_text("DEPTH = 3  # longer than before\n")
    assert ask() == (3 * (8 * 8 + 8), False)
    assert ask() == (3 * (8 * 8 + 8), True)


BAD = (
    ("plan", {"cluster": "cpu:2"}, "AP136", "'target' is a required property"),
    ("plan", {**SMALL, "global_batch": "many"}, "AP136", "'many' is not of type 'integer'"),
    ("plan", {**SMALL, "precision": "fp7"}, "AP136", "'fp7' is not one of"),
    ("plan", {**SMALL, "global_bach": 8}, "AP141", "unknown option 'global_bach'"),
    ("plan", {**SMALL, "target": "modle.py"}, "AP101", "modle.py"),
    ("plan", {**SMALL, "cluster": "8xH1000"}, "AP115", "H1000"),
    ("plan", {**SMALL, "set": ["width"]}, "AP111", "width"),
    ("plan", {**SMALL, "memory_limit": "1KB"}, "AP301", "does not fit"),
    ("simulate", {**SMALL, "parallel": "dp=3"}, "AP127", "is 3 devices"),
    ("explain", {"plan": "none.json", "name": "zero"}, "AP101", "there is no plan none.json"),
    ("compare", {"items": ["model.py"]}, "AP356", "at least two"),
    ("train", {}, "AP135", "there is no tool train"),
    ("plan", {**SMALL, "target": "exits.py"}, "AP103", "SystemExit: 3"),
    ("plan", {**SMALL, "target": "fails.py"}, "AP103", "fails when it is imported"),
)


def test_errors_are_data_and_the_server_goes_on(model_file: Path) -> None:
    (model_file.parent / "exits.py").write_text("raise SystemExit(3)\n")
    (model_file.parent / "fails.py").write_text("1 / 0\n")

    async def said(session: Any) -> None:
        for name, arguments, code, words in BAD:
            result = await session.call_tool(name, arguments)
            found = document(result)
            assert result.is_error, (name, arguments)
            assert found["schema"] == "autoparallel.error/1"
            assert found["error"]["code"].startswith(code), (arguments, found)
            assert words in found["error"]["message"], (arguments, found)
        assert not (await session.call_tool("simulate", SMALL)).is_error

    talk(model_file.parent, said)


def test_arguments_are_the_options_that_the_command_declares() -> None:
    own = server.input_schema("plan")
    Draft202012Validator.check_schema(own)
    properties = own["properties"]
    assert set(declared(PlanOptions)) <= set(properties)
    assert own["required"] == ["target"]
    for name, (_, option) in declared(PlanOptions).items():
        assert properties[name]["description"] == option.help
        assert properties[name].get("enum") == (option.choices and list(option.choices.names))
    assert properties["global_batch"]["minimum"] == 1
    assert properties["global_batch"]["default"] == 32
    assert properties["set"]["type"] == "array"
    assert {"json", "check", "html"} & set(properties) == set()


def test_an_internal_error_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setitem(server.TOOLS, "plan", broken)
    monkeypatch.setattr(server, "_values", lambda name, given: given)
    found, is_error = server.answer("plan", {})
    assert is_error
    assert found["error"]["code"] == "AP999"
    assert "ZeroDivisionError: by nothing" in found["error"]["message"]


def test_without_the_extra_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert run_command(["mcp"]) == 5
    said = capsys.readouterr()
    assert "error[AP404]" in said.err
    assert "pip install 'torch-autoparallel[mcp]'" in said.err
    assert said.out == ""


def test_the_server_ends_when_its_client_is_gone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autoparallel", "mcp"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "")


def skill_parts() -> Mapping[str, str]:
    head = server.skill_text().split("---\n")[1]
    return dict(line.split(": ", 1) for line in head.splitlines())


def test_the_skill_has_front_matter_and_few_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert skill_parts()["name"] == "autoparallel"
    assert len(skill_parts()["description"]) <= 1024
    assert len(server.skill_text().split()) <= 500
    assert run_command(["mcp", "--skill"]) == 0
    assert capsys.readouterr().out == server.skill_text()


def test_the_commands_of_the_skill_run(model_file: Path) -> None:
    model_file.write_text(model_file.read_text().replace("depth=2", "depth=1"))
    blocks = re.findall(r"^```\n(.*?)^```", server.skill_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 12
    for line in lines:
        command, *words = shlex.split(line)
        assert command == "autoparallel"
        done = run_python(
            "-m",
            "autoparallel",
            *words,
            folder=model_file.parent,
            environment={**os.environ, "AUTOPARALLEL_MEASURE_SECONDS": "0"},
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if "--json" in words:
            Draft202012Validator(document_schema(words[0])).validate(json.loads(done.stdout))
    inline = re.findall(r"`(autoparallel [a-z]+)", server.skill_text())
    assert all(run_command([*each.split()[1:], "--help"]) == 0 for each in inline)
