"""Command line ``autoparallel``: commands in, an exit code out.

======  =====================================
 code    meaning
======  =====================================
0        done
1        internal error
2        usage: a file, an option, a contract
3        the model cannot be captured
4        infeasible: nothing fits
5        this machine or installation
6        a stale or damaged plan
7        verification failed
8        time limit without a plan
20       a worker failed
21       a worker hangs
22       a worker ran out of memory
130      interrupted
======  =====================================

The result goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from autoparallel import __version__
from autoparallel.commands.help import HelpGroup
from autoparallel.commands.machine import cache, doctor, mcp, profile
from autoparallel.commands.planning import cluster, estimate, ops, plan, schedules, simulate
from autoparallel.commands.reading import compare, explain, export, inspect, program
from autoparallel.commands.training import launch, run, verify
from autoparallel.cost_model.cluster.given_text import printable
from autoparallel.options.outputs import file_error
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import AutoparallelError, UsageError

INTERRUPTED = 130

LISTINGS = (cluster, schedules, ops, cache, program)
"""Commands of ``autoparallel show``."""

SHOW = "Show what there is: clusters, schedules, ops, the cache, a stage's integer program."

app = typer.Typer(
    name="autoparallel",
    cls=HelpGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    plan,
    estimate,
    inspect,
    explain,
    compare,
    run,
    launch,
    verify,
    export,
    profile,
    simulate,
    doctor,
    mcp,
):
    app.command()(command)

show = typer.Typer(name="show", help=SHOW, no_args_is_help=True)
for listing in LISTINGS:
    show.command()(listing)
app.add_typer(show)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoparallel {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="the version")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="show the Python traceback of an error")
    ] = False,
) -> None:
    """Find the fastest way to train a PyTorch model on a cluster, and train it that way."""


def main() -> None:
    """Run the command line of this process and exit with its code."""
    _open_streams()
    code = run_command(sys.argv[1:])
    gc.freeze()  # else the collector scans all objects of a search at exit
    sys.exit(code)


def _open_streams() -> None:
    """Open stdout and stderr on the null device if they are closed, and make them escape characters
    that their encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for the process
        getattr(sys, name).reconfigure(errors="backslashreplace")


def run_command(arguments: list[str]) -> int:
    """Run a command line and return its exit code. ``--traceback`` (print the Python traceback of
    an error) is accepted at any position."""
    show_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        code = app(arguments, prog_name="autoparallel", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except AutoparallelError as error:
        _explain(str(error), show_traceback)
        return error.exit_code
    except KeyboardInterrupt:
        print("autoparallel: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        own = file_error(error)
        _explain(str(own), show_traceback)
        return own.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of the program
        if hasattr(error, "format_message"):  # of click, which typer has under another name too
            return _refuse(error)
        name = type(error).__name__
        _explain(f"internal error: {name}: {error}", show_traceback)
        if not show_traceback:
            print("  fix: run again with --traceback, and report what it shows", file=sys.stderr)
        return 1


def _refuse(error: Any) -> int:
    """Print click's error about a command's arguments, with a fix, and return the exit code."""
    context = error.ctx
    path = "autoparallel" if context is None else context.command_path
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), nl=False)  # empty where rich has printed the help
        return 2
    message = error.format_message().rstrip(".")
    name = getattr(error, "option_name", "") or "".join(message.split("'")[1:2])
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        known = [each for own in context.command.params for each in own.opts]
        fix = did_you_mean(name, known) or f"{path} -h lists its options"
        own = UsageError("AP135", f"{path} has no option {name}", fix=fix)
    elif message.startswith("No such command"):
        known = sorted(context.command.commands)
        fix = did_you_mean(name, known) or f"the commands are {', '.join(known)}"
        if name in {each.__name__ for each in LISTINGS}:
            fix = f"autoparallel show {name}"
        own = UsageError("AP135", f"there is no command {name}", fix=fix)
    else:
        message = message[0].lower() + message[1:]
        own = UsageError("AP136", f"{path}: {message}", fix=f"{path} -h shows how it is used")
    print(printable(str(own)), file=sys.stderr)
    return own.exit_code


def _explain(text: str, show_traceback: bool) -> None:
    if show_traceback:
        traceback.print_exc()
    print(printable(text), file=sys.stderr)


if __name__ == "__main__":
    main()
