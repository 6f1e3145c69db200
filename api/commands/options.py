"""Declarations of commands: shared options, and how a command runs what it declares."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import is_dataclass
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer

from autoparallel.options.option import parameters, read_options
from autoparallel.options.parse import Sorting
from autoparallel.options.results import others_on_stderr

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:function, package.module:function or hf:PATH_OR_NAME",
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="local, 8xH100, 4x8xA100-80GB, 2x8xA100+8xH100 (hosts that differ), cpu:4, or a TOML "
        "file (hosts in racks, prices)",
    ),
]
SortOption = Annotated[
    Sorting | None,
    typer.Option("--sort", help="order of the rows, the least first; default: as given"),
]
SetupOption = Annotated[
    str,
    typer.Option(
        "--setup",
        metavar="COMMAND",
        help="shell command that each host runs first: 'source venv/bin/activate'",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a setting for build_model; repeatable"),
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=8,alpha=16",
        help="train adapters of an hf: target and freeze its weights; targets=A+B names its "
        "layers, base=nf4 holds frozen weights in 4 bits",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="seconds without progress that end the run")
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="run the code that the plan names even if it is outside of this folder"
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="FILE", help="database of measured times; default: the user's"
    ),
]
PlanOrTargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN_OR_TARGET",
        help="a plan file (.json), or a TARGET that is planned first",
    ),
]
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="a plan file")]

Command = Callable[..., None]


def _show_schema(context: typer.Context, wanted: bool) -> None:
    if wanted:
        schema = import_module("autoparallel.agents.documents").document_schema(context.info_name)
        typer.echo(json.dumps(schema, indent=2))
        raise typer.Exit


KEYWORD = inspect.Parameter.KEYWORD_ONLY
_FLAG: Any = typer.Option(
    "--json-schema", help="print the JSON Schema of --json", callback=_show_schema, is_eager=True
)
SCHEMA = inspect.Parameter("json_schema", KEYWORD, default=False, annotation=Annotated[bool, _FLAG])


def command(
    module: str,
    *,
    without: Collection[str] = (),
    starts_others: bool = False,
    **defaults: Any,
) -> Callable[[Command], Command]:
    """Return a decorator that makes a typer command of a declaration: a function with only
    parameters, carried out by the function of the same name in the module ``module``.

    The module is loaded when the command runs, and with it torch. A parameter whose type is a
    dataclass of options (``options.option``) stands for its options: all but the names in
    ``without``, with defaults replaced by ``defaults``. The command prints only results on stdout,
    unless it ``starts_others``, processes that print there too; JSON is always alone.
    """

    def decorate(declaration: Command) -> Command:
        groups: dict[str, tuple[type, Collection[str]]] = {}
        declared: list[inspect.Parameter] = []
        hints = get_type_hints(declaration, include_extras=True)
        for name, own in inspect.signature(declaration).parameters.items():
            if not is_dataclass(hints[name]):
                declared.append(own.replace(annotation=hints[name], kind=KEYWORD))
                continue
            options = parameters(hints[name])
            chosen = [option for option in options if option not in without]
            groups[name] = hints[name], chosen
            for option in chosen:
                default = defaults.get(option, options[option].default)
                declared.append(options[option].replace(default=default))
        if "json" in hints:
            declared.append(SCHEMA)

        @functools.wraps(declaration)
        def run(**given: Any) -> None:
            given.pop("json_schema", None)
            for name, (owner, chosen) in groups.items():
                given[name] = read_options(owner, {option: given.pop(option) for option in chosen})
            action = import_module(f"autoparallel.actions.{module}")
            carry_out = getattr(action, declaration.__name__)
            with nullcontext() if starts_others and not given.get("json") else others_on_stderr():
                carry_out(**given)

        run.__annotations__ = {each.name: each.annotation for each in declared}
        run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
        return run

    return decorate
