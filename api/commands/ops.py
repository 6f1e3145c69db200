"""``autoparallel ops``: the ops that can be split, with their annotations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from autoparallel.commands.options import JsonOption, print_json, stdout_console
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import UsageError

NameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="only ops whose name contains this")
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="also list the ops that this target registers")
]


def ops(name: NameArgument = None, target: TargetOption = None, json: JsonOption = False) -> None:
    """List the ops with a sharding rule: their annotations and the dimensions that can be sharded.

    A letter is a dimension, *b any leading ones, _ one that is never split, [] an operand
    that only conditions the result. -> is linear in each factor; => is any function.
    An op without a rule is replicated on every rank; `inspect` shows what that costs.
    """
    from autoparallel.planner.rules.listing import list_rules

    registered = {}
    if target is not None:
        from autoparallel.target.load import load_target
        from autoparallel.target.register_op import registered_rules

        load_target(target)
        registered = dict(registered_rules())
    rules = list_rules(registered)
    found = [rule for rule in rules if name is None or name.lower() in rule.op.lower()]
    if not found:
        raise UsageError(
            "AP167",
            f"no op with a sharding rule has {name!r} in its name",
            why="an op without a rule is replicated on every rank",
            fix=did_you_mean(name or "", [rule.op for rule in rules])
            or 'give it a rule: @autoparallel.register_op("b s h, h o -> b s o")',
        )
    if json:
        print_json([asdict(rule) for rule in found])
        return
    _print_table(found, len(rules))


def _print_table(found: list, total: int) -> None:  # type: ignore[type-arg]
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for header, ratio in (("op", 9), ("annotation", 10), ("shardable dimensions", 11)):
        table.add_column(header, ratio=ratio, overflow="fold")
    table.expand = True
    for rule in found:
        annotation = (
            Text(rule.annotation) if rule.annotation else Text("depends on its arguments", "dim")
        )
        table.add_row(Text(rule.op), annotation, Text(rule.splits))
    console.print(table)
    console.print(Text(f"{len(found)} of {total} ops with a rule", style="dim"))
