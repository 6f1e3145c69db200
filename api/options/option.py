"""Options declared once, as fields of frozen dataclasses.

A field is declared by ``option`` with its help, and with a function from the user's text to its
value. ``parameters`` derives the parameters of a command; ``read_options`` makes the dataclass from
arguments. Both the command line and the Python API use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from autoparallel.cost_model.cluster.given_text import shortened
from autoparallel.options.parse import choice_error, did_you_mean
from autoparallel.planner.errors import UsageError

LARGEST = 1e18
"""Maximum value of a number option that declares no maximum."""

Options = TypeVar("Options")
"""Dataclass whose fields are options."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Allowed values of an option, and the UsageError code for all other values."""

    code: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of an option of commands and Python functions, for a field of a dataclass.

    ``name`` is the option's name, "" for the field's, and ``type`` the type that users write.
    ``read`` converts the user's value to the field's; ``given`` is the default as users write it.
    """

    help: str
    name: str = ""
    type: Any = None
    given: Any = None
    read: Callable[[Any], Any] | None = None
    choices: Choices | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    min: float | None = None
    max: float | None = None


def option(default: Any, help: str, **how: Any) -> Any:
    """Declare a dataclass field as an option, with a default. ``how``: fields of ``Option``."""
    metadata = {"option": Option(help=help, **how)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(owner: Any) -> dict[str, tuple[Field[Any], Option]]:
    """Return the options of a dataclass by name, each with its field."""
    found = {}
    for each in fields(owner):
        own = each.metadata.get("option")
        if own is not None:
            found[own.name or each.name] = (each, own)
    return found


def read_options(owner: type[Options], given: Mapping[str, Any]) -> Options:
    """Make a dataclass of options from values by option name, in the form that users write.

    Raises UsageError AP141 for an unknown name, AP133 for a number out of range, and the errors of
    parsing a value.
    """
    known = declared(owner)
    check_names(given, list(known))
    values = {}
    for name, (own, how) in known.items():
        if how.read is not None:
            values[own.name] = how.read(given.get(name, how.given))
        elif name in given:
            values[own.name] = given[name]
    made = owner(**values)
    check_values(made)
    return made


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise UsageError AP141 for a name that is not in ``known``."""
    for name in given:
        if name not in known:
            raise UsageError(
                "AP141",
                f"unknown option {name!r}",
                fix=did_you_mean(name, known) or f"the options are {', '.join(known)}",
            )


def check_values(options: Any) -> None:
    """Raise UsageError for a value that is not among the option's choices, and AP133 for a number
    out of range or not finite."""
    for name, (own, how) in declared(type(options)).items():
        value = getattr(options, own.name)
        if how.choices and value is not None and value not in how.choices.names:
            raise choice_error(how.choices.code, name, value, how.choices.names)
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = -LARGEST if how.min is None else how.min
            most = LARGEST if how.max is None else how.max
            if not least <= value <= most:
                what = f"{name} {shortened(str(value))} is not between {least:g} and {most:g}"
                raise UsageError("AP133", what, where=f"--{name.replace('_', '-')}")


@cache
def parameters(owner: Any) -> dict[str, inspect.Parameter]:
    """Return the command-line parameters that a dataclass of options stands for, by name."""
    hints = get_type_hints(owner)
    return {
        name: _parameter(name, own, how, hints[own.name])
        for name, (own, how) in declared(owner).items()
    }


def _parameter(name: str, own: Field[Any], how: Option, hint: Any) -> inspect.Parameter:
    kind = how.type or (str if how.choices else hint)
    default = own.default if how.read is None and own.default is not MISSING else how.given
    if how.choices and default is None:
        kind = str | None
    flags = how.flags or ("--" + name.replace("_", "-"),)
    said = typer.Option(*flags, help=how.help, metavar=how.metavar)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, said, how]
    )
