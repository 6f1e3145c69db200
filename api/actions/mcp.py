"""``autoparallel mcp``: commands as the tools of a server (modelcontextprotocol.io), or a skill.

In: calls of a tool, each with options of the command of its name, as the command declares them.
Out: the JSON document that the command prints with ``--json``, or one of its error. Calls are
answered one after the other by one process, which stays warm.
"""

from __future__ import annotations

import io
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.resources import files
from inspect import Parameter, getdoc, signature
from types import NoneType
from typing import Any, get_args

from autoparallel import __version__
from autoparallel.agents.documents import document_schema
from autoparallel.cache.captures import user_modules
from autoparallel.commands.planning import estimate, plan, simulate
from autoparallel.commands.reading import compare, explain
from autoparallel.options.json_schema import Schema, json_schema
from autoparallel.options.option import check_names
from autoparallel.options.outputs import file_error
from autoparallel.options.parse import did_you_mean
from autoparallel.options.results import say, schema_name
from autoparallel.planner.errors import AutoparallelError, InternalError, MachineError, UsageError

TOOLS = {each.__name__: each for each in (plan, estimate, simulate, explain, compare)}

LEFT_OUT = ("json", "json_schema", "check", "html")  # options that choose the output


def mcp(*, skill: bool) -> None:
    """Serve the commands as MCP tools on stdio or, with ``skill``, print the file SKILL.md."""
    say(skill_text(), nl=False) if skill else serve()


def skill_text() -> str:
    """Return the text of SKILL.md, which tells AI agents how to use the commands and MCP tools."""
    return files("autoparallel.agents").joinpath("SKILL.md").read_text(encoding="utf-8")


def parameters(name: str) -> dict[str, Parameter]:
    """Map the argument names of an MCP tool to the parameters of its command's function. An
    argument is named like the option: ``--global-batch`` gives ``global_batch``."""
    found = {}
    for each in signature(TOOLS[name]).parameters.values():
        said = get_args(each.annotation)[1]
        flags = (said.default, *(said.param_decls or ()))  # typer takes the first for a default
        long = next((flag for flag in flags if str(flag).startswith("--")), each.name)
        if each.name not in LEFT_OUT:
            found[long.partition("/")[0].removeprefix("--").replace("-", "_")] = each
    return found


def input_schema(name: str) -> Schema:
    """Return the JSON Schema of the arguments of the MCP tool ``name``; null is never allowed."""
    found: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
    own = parameters(name)
    for key, each in own.items():
        kind, *_, option = get_args(each.annotation)
        choices = getattr(option, "choices", None)
        more = {
            "description": option.help,
            "minimum": option.min,
            "maximum": option.max,
            "enum": choices and list(choices.names),
            "default": None if each.default is each.empty else each.default,
        }
        kinds = [inner for inner in get_args(kind) if inner is not NoneType]
        schema = json_schema(kinds[0] if NoneType in get_args(kind) else kind)
        more = {word: value for word, value in more.items() if value not in (None, "")}
        found["properties"][key] = schema | more
    return found | {"required": [key for key, each in own.items() if each.default is each.empty]}


def answer(name: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Run the command of the MCP tool ``name`` with the arguments ``given``.

    Returns the JSON document that the command prints and False, or its error as JSON and True.
    """
    try:
        values = _values(name, given)
        with _new_modules(), redirect_stdout(io.StringIO()) as printed:
            TOOLS[name](**values)
        return json.loads(printed.getvalue()), False
    except AutoparallelError as error:
        own = error
    except OSError as error:
        own = file_error(error)
    except SystemExit as error:
        own = UsageError("AP103", f"the target's code ends the process (SystemExit: {error})")
    except Exception as error:  # noqa: BLE001 - the edge of the program
        traceback.print_exc()
        fix = f"run autoparallel {name} with --traceback, and report what it shows"
        own = InternalError("AP999", f"internal error: {type(error).__name__}: {error}", fix=fix)
    texts = {"code": own.code, "message": own.what}
    texts |= {"why": own.why, "where": own.where, "fix": own.fix}
    return {"schema": schema_name("error"), "error": {k: t for k, t in texts.items() if t}}, True


@contextmanager
def _new_modules() -> Iterator[None]:
    """Forget the user's modules that are loaded inside the context, so that the next call runs
    their files as they are then."""
    known = set(sys.modules)
    try:
        yield
    finally:
        for name in user_modules().keys() - known:
            del sys.modules[name]


def _values(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for each parameter of a tool's command, from ``given`` or the default.

    Raises UsageError: AP135 for an unknown tool, AP141 for an unknown argument, AP136 for a missing
    or wrong argument.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    if name not in TOOLS:
        fix = did_you_mean(name, list(TOOLS)) or f"the tools are {', '.join(TOOLS)}"
        raise UsageError("AP135", f"there is no tool {name}", fix=fix)
    own, schema = parameters(name), input_schema(name)
    check_names(given, list(own))
    wrong = best_match(Draft202012Validator(schema).iter_errors(given))
    if wrong is not None:
        where = str(wrong.path[0] if wrong.path else schema["required"][0])
        fix = f"{where}: {schema['properties'][where]['description']}"
        raise UsageError("AP136", f"{name}: {wrong.message}", where=where, fix=fix)
    every = signature(TOOLS[name]).parameters.values()
    values = {each.name: each.default for each in every} | {"json": True}
    return values | {own[key].name: value for key, value in given.items()}


def serve() -> None:
    """Serve the tools on stdin and stdout until the client closes the streams.

    Raises MachineError AP404 if the Python package ``mcp`` is not installed.
    """
    try:
        import anyio
        from mcp import types
        from mcp.server.lowlevel import Server
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        fix = "pip install 'torch-autoparallel[mcp]'"
        what = "the server needs the package mcp"
        raise MachineError("AP404", what, why=str(error), fix=fix) from error

    tools = [
        types.Tool(
            name=name,
            description=getdoc(command),
            input_schema=input_schema(name),
            output_schema=document_schema(name),
            annotations={"read_only_hint": not {"output", "trace"} & set(parameters(name))},
        )
        for name, command in TOOLS.items()
    ]
    one_by_one = anyio.CapacityLimiter(1)

    async def list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> Any:
        async def tell() -> None:
            began = anyio.current_time()
            while True:
                await anyio.sleep(5.0)  # clients wait on after each notification
                await context.session.report_progress(anyio.current_time() - began)

        call = partial(answer, params.name, params.arguments or {})
        async with anyio.create_task_group() as group:
            group.start_soon(tell)
            document, is_error = await anyio.to_thread.run_sync(call, limiter=one_by_one)
            group.cancel_scope.cancel()
        content = [types.TextContent(text=json.dumps(document))]
        return types.CallToolResult(content=content, structured_content=document, is_error=is_error)

    server = Server(
        "autoparallel",
        version=__version__,
        instructions=skill_text().split("---\n", 2)[2].strip(),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )

    async def run() -> None:
        async with stdio_server() as (reading, writing):
            print("autoparallel: serving on stdin and stdout", file=sys.stderr)
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(run)
