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
    """Group of commands with a short help; ``--help-all`` shows rare options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Sort the options of all commands into panels, and read ``--help-all`` as ``--help``."""
        arrange(self, shows_all=ALL in args)
        return super().parse_args(ctx, ["--help" if each == ALL else each for each in args])


def arrange(group: Any, *, shows_all: bool) -> None:
    """Sort a group's long lists of options into panels; hide rare options unless ``shows_all``."""
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
    """Return all commands of a group and its subgroups, by their words (``show ops``)."""
    found: dict[str, Any] = {}
    for name, own in group.commands.items():
        is_group = hasattr(own, "commands")
        found |= leaf_commands(own, f"{path}{name} ") if is_group else {path + name: own}
    return found
