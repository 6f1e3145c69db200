"""Help of commands: common options in named groups, all others behind ``--help-all``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Model and devices": (
        "cluster",
        "global_batch",
        "seq",
        "precision",
        "optimizer",
        "memory_limit",
        "compile",
        "settings",
        "lora",
        "devices",
        "tokens",
    ),
    "Plan": ("parallel", "deny", "objective", "price", "time_limit", "output", "json"),
    "Training": (
        "steps",
        "seed",
        "weights",
        "data",
        "clip_norm",
        "accumulate",
        "metrics",
        "verified",
    ),
    "Checkpoints": ("save", "save_every", "keep", "resume", "max_restarts"),
    "Hosts": ("nnodes", "rdzv_endpoint", "trust"),
}
"""Options shown by the help of a command with many options, by the title of their group."""

MANY = 16
"""Number of options up to which a command's help shows all of them."""

ALL = "--help-all"


class HelpGroup(TyperGroup):
    """Group of commands whose help is arranged, all of it where ``--help-all`` is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arrange the help of all commands, and read ``--help-all`` as ``--help``."""
        arrange(self, shows_all=ALL in args)
        return super().parse_args(ctx, ["--help" if each == ALL else each for each in args])


def arrange(group: Any, *, shows_all: bool) -> None:
    """Put the options of a group's commands into panels; hide the others, or give them a panel."""
    panels = {name: title for title, names in PANELS.items() for name in names}
    for path, command in leaf_commands(group).items():
        options = [own for own in command.params if own.param_type_name == "option"]
        if len(options) <= MANY:
            continue
        order = {name: at for at, name in enumerate(panels)}
        command.params.sort(key=lambda own: order.get(own.name, len(order)))
        rare = [own for own in options if own.name not in panels]
        for own in options:
            own.rich_help_panel = panels.get(own.name, "Other options")
        for own in rare:
            own.hidden = not shows_all
        if rare and not shows_all:
            command.epilog = f"{len(rare)} more options: {path} {ALL}"


def leaf_commands(group: Any, path: str = "") -> dict[str, Any]:
    """Return the commands of a group and of the groups in it, by the words that a user types."""
    found: dict[str, Any] = {}
    for name, own in group.commands.items():
        is_group = hasattr(own, "commands")
        found |= leaf_commands(own, f"{path}{name} ") if is_group else {path + name: own}
    return found
