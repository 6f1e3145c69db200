"""References made of the code: commands, errors, plan files' fields, the presets.

``python docs/site/references.py`` (``make references``) writes ``docs/cli.md`` and
``docs/errors.md``, which are committed; the site has the others too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from error_messages import read_errors

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "<!-- Generated from the code by `make references`: do not edit. -->"
"""The first line of the references that are committed."""

MESSAGES_SHOWN = 2
"""Messages of a code that the page of errors shows."""

FEWEST_SHARED = 5
"""A command that shares fewer options with ``plan`` lists them all."""

ERRORS_INTRODUCTION = """\
# Errors

This page lists every error by its code. An error prints what happened, then `-->` where, `why:` \
the cause and `fix:` what to try. Codes are stable. A command ends with the exit code of the \
error's class; an error without a code ends it with 1 (`--traceback` shows where it came from), an \
interrupt with 130.

`…` stands for a value. Of a code with several messages the page shows two."""

COMMANDS_INTRODUCTION = """\
# Commands and options

This page lists every option of every command, as `autoparallel COMMAND --help` does. Results go \
to stdout, progress and errors to stderr. `--traceback` anywhere on the line shows the Python \
traceback of an error; [errors.md](errors.md) has the exit codes."""


def errors_page() -> str:
    """Return the page of all error codes, by class, from the code that raises them."""
    from autoparallel.planner import errors

    raised = read_errors(ROOT)
    sections = [GENERATED, ERRORS_INTRODUCTION]
    for name, kind in vars(errors).items():
        rows = [
            f"| {code} | {_cell('; '.join(error.messages[:MESSAGES_SHOWN]))} |"
            for code, error in raised.items()
            if error.class_name == name
        ]
        if rows:
            sections.append(f"## {name}: exit code {kind.exit_code}")
            sections.append(inspect.cleandoc(kind.__doc__))
            sections.append("\n".join(["| code | messages |", "|---|---|", *rows]))
    return "\n\n".join(sections) + "\n"


def commands_page() -> str:
    """Return the page of every command with its arguments and options, from the typer app."""
    from autoparallel.__main__ import app
    from autoparallel.commands.help import leaf_commands

    commands = leaf_commands(typer.main.get_command(app))
    options_of_plan = {_entry(each) for each in _options(commands["plan"])}
    sections = [GENERATED, COMMANDS_INTRODUCTION]
    for name, command in commands.items():
        shared = [each for each in _options(command) if _entry(each) in options_of_plan]
        if name == "plan" or len(shared) < FEWEST_SHARED:
            shared = []
        entries = [_entry(each) for each in command.params if each not in shared]
        if shared:
            names = ", ".join(f"`{each.opts[-1]}`" for each in shared)
            entries.append(f"- As for [plan](#plan): {names}.")
        sections += [f"## {name}", inspect.cleandoc(command.help or ""), "\n".join(entries)]
    sections += _json_sections()
    return "\n\n".join(sections) + "\n"


JSON_INTRODUCTION = """\
## JSON

With `--json` a command prints one document and nothing else on stdout: \
`{"schema": "autoparallel.COMMAND/1", "result": …}`. `autoparallel COMMAND --json-schema` prints \
its JSON Schema. Within a version fields are only added, so readers ignore fields that they do not \
know. Tools of `autoparallel mcp` answer with the same documents; that of an error has the schema \
`autoparallel.error/1` and the key `error`, an object with `code`, `message` and, where known, \
`why`, `where` and `fix`."""

OF_PLANS = ("PlanFile", "ClusterTable", "Preset")
"""Classes whose fields, and those of classes inside them, only the JSON Schema lists."""

BESIDE = ("CheckedTarget",)
"""Classes beside those of ``OF_PLANS`` in the results of one command."""


def _json_sections() -> Iterator[str]:
    """Yield the results of commands with ``--json``, and the fields of their classes."""
    from autoparallel.agents.documents import RESULTS, document_schema

    yield JSON_INTRODUCTION
    schemas = {name: document_schema(name) for name in RESULTS}
    stated = [each["properties"] for each in schemas.values()]
    rows = [f"| `{each['schema']['const']}` | {schema_text(each['result'])} |" for each in stated]
    yield "\n".join(["| schema | result |", "|---|---|", *rows])
    classes = {}
    for schema in schemas.values():
        defined = schema["$defs"]
        of_plans = set(OF_PLANS) & set(defined)
        classes |= {name: each for name, each in defined.items() if not of_plans or name in BESIDE}
    for name, each in classes.items():
        fields = [
            f"| `{key}` | {_cell(schema_text(own))} |{'' if key in each['required'] else ' yes'} |"
            for key, own in each["properties"].items()
        ]
        yield f"### {name}"
        yield each["description"]
        yield "\n".join(["| field | type | may be missing |", "|---|---|---|", *fields])


def schema_text(schema: dict[str, Any]) -> str:
    """Describe a JSON Schema in words.

    >>> schema_text({"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}})
    'list of number or null'
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in OF_PLANS:
            return {"PlanFile": "a plan file", "Preset": "a preset"}.get(name, "a cluster")
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(schema_text, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "prefixItems" in schema:
        return f"list: {', '.join(map(schema_text, schema['prefixItems']))}"
    if "items" in schema:
        return f"list of {schema_text(schema['items'])}"
    if "additionalProperties" in schema:
        return f"object of {schema_text(schema['additionalProperties'])}"
    return str(schema.get("type", "any value"))


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option"]


def _entry(parameter: Any) -> str:
    """Return the line of an argument or option."""
    if parameter.param_type_name == "argument":
        name = f"`{parameter.metavar or parameter.name}`"
        default = ""
    else:
        names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
        metavar = "" if parameter.is_flag else f" `{parameter.metavar or parameter.name.upper()}`"
        name, default = names + metavar, _default(parameter)
    text = (parameter.help or "").replace("\n", " ")
    return f"- {name}{f' ({default})' if default else ''}: {text}"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value in (None, "", False) or callable(value) or value == []:
        return ""
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def plan_page() -> str:
    """Every field of a plan file, from the dataclasses of ``planner.plan``."""
    from autoparallel.planner.plan import SCHEMA, Plan

    lines = [
        "# Plan files",
        "",
        f"This page lists the fields of a plan file, which is JSON in UTF-8. Its `schema` is "
        f"{SCHEMA}; files of earlier schemas still load. Enum-like fields list their values. A "
        "plan that was changed by hand is refused (AP505).",
    ]
    for kind in classes_of(Plan):
        hints = typing.get_type_hints(kind)
        text = re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(kind.__doc__ or ""))
        lines += [
            "",
            f"## {kind.__name__}",
            "",
            text,
            "",
            "| field | type | default |",
            "|---|---|---|",
        ]
        for each in dataclasses.fields(kind):
            lines.append(
                f"| `{each.name}` | {_cell(type_text(hints[each.name]))} | {_field_default(each)} |"
            )
    return "\n".join(lines) + "\n"


def devices_page() -> str:
    """Every preset of a device and a link, each figure with its source."""
    from autoparallel.actions.cluster import device_figures, link_figures
    from autoparallel.cost_model.cluster.presets import device_presets, link_presets

    lines = [
        "# Devices and links",
        "",
        "This page lists the presets of clusters and where each of their figures was read, as "
        "`autoparallel show cluster 8xNAME` does. Peaks are dense, those of GeForce cards with "
        "float32 accumulation. Measure your own machine to replace them "
        "([costs.md](costs.md#measured-times)).",
    ]
    for name, preset in device_presets().items():
        lines += [
            "",
            f"## {name}",
            "",
            f"Usually {preset.host_size} on a host, joined by "
            f"`{preset.link}`; hosts by `{preset.fabric}`.",
        ]
        lines += _figures(device_figures(preset.device))
    for name, link in link_presets().items():
        lines += ["", f"## {name}", *_figures(link_figures(link))]
    return "\n".join(lines) + "\n"


def _figures(figures: list[tuple[str, str, str]]) -> list[str]:
    rows = [f"| {name} | {value} | {_cell(source)} |" for name, value, source in figures]
    return ["", "| figure | value | source |", "|---|---|---|", *rows]


def _field_default(each: dataclasses.Field[Any]) -> str:
    if each.default is not dataclasses.MISSING:
        return f"`{each.default!r}`"
    return "empty" if each.default_factory is not dataclasses.MISSING else "required"


def classes_of(kind: type) -> list[type]:
    """A dataclass and all those that its fields hold, each once."""
    found: list[type] = []
    todo = [kind]
    while todo:
        own = todo.pop(0)
        if own in found:
            continue
        found.append(own)
        for hint in typing.get_type_hints(own).values():
            todo += _inside(hint)
    return found


def _inside(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for each in typing.get_args(hint):
        yield from _inside(each)


def type_text(hint: Any) -> str:
    """A type in words.

    >>> type_text(tuple[int, ...]), type_text(int | None)
    ('list of whole number', 'whole number or null')
    """
    plain = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in plain:
        return plain[hint]
    if hint is Any:
        return "any value"
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(each) for each in inner)
    if origin is tuple and len(inner) == 2 and inner[1] is ...:
        return f"list of {type_text(inner[0])}"
    if origin is tuple:
        return "list: " + ", ".join(type_text(each) for each in inner)
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if len(inner) == 2:
        return f"object: {type_text(inner[0])} to {type_text(inner[1])}"
    return f"list of {type_text(inner[0])}" if inner else getattr(hint, "__name__", str(hint))


COMMITTED: dict[str, Callable[[], str]] = {"cli.md": commands_page, "errors.md": errors_page}
"""The references that are committed, by their names in ``docs/``."""


def main() -> int:
    """Write the references that are committed."""
    for name, page in COMMITTED.items():
        (ROOT / "docs" / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
