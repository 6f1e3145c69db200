"""References made of the code: the command line's options, plan files' fields, the presets."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import typer.main


def commands_page() -> str:
    """Every command with its arguments and options, from the typer app."""
    from autoparallel.__main__ import app

    group = typer.main.get_command(app)
    lines = [
        "# All commands and options", "",
        "This page lists every option of every command, as `autoparallel COMMAND --help` does. "
        "[cli.md](cli.md) explains them.",
    ]  # fmt: skip
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        lines += ["", f"## {name}", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [_option(parameter) for parameter in command.params if parameter.name != "help"]
    return "\n".join(lines) + "\n"


def _option(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{parameter.metavar or parameter.name}`"
        default = "required" if parameter.required else ""
    else:
        names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
        metavar = "" if parameter.is_flag else f" `{parameter.metavar or parameter.name.upper()}`"
        name, default = names + metavar, _default(parameter)
    return f"| {_cell(name)} | {_cell(default)} | {_cell(parameter.help or '')} |"


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
        "# Plan files", "",
        f"This page lists the fields of a plan file, which is JSON in UTF-8. Its `schema` is "
        f"{SCHEMA}; files of earlier schemas still load. Enum-like fields list their values. A "
        "plan that was changed by hand is refused (AP505).",
    ]  # fmt: skip
    for kind in classes_of(Plan):
        hints = typing.get_type_hints(kind)
        text = re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(kind.__doc__ or ""))
        lines += ["", f"## {kind.__name__}", "", text, "", "| field | type | default |",
                  "|---|---|---|"]  # fmt: skip
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
        "# Devices and links", "",
        "This page lists the presets of clusters and where each of their figures was read, as "
        "`autoparallel cluster 8xNAME` does. Peaks are dense, those of GeForce cards with "
        "float32 accumulation. Measure your own machine to replace them "
        "([profiling.md](profiling.md)).",
    ]  # fmt: skip
    for name, preset in device_presets().items():
        lines += ["", f"## {name}", "", f"Usually {preset.host_size} on a host, joined by "
                  f"`{preset.link}`; hosts by `{preset.fabric}`."]  # fmt: skip
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
    plain = {int: "whole number", float: "number", str: "text", bool: "true or false",
             type(None): "null"}  # fmt: skip
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
