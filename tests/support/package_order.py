"""The order of packages and folders: each imports only what stands before it."""

from __future__ import annotations

PLANNER = (
    "graph",
    "errors",
    "ops",
    "plan",
    "schedules",
    "integer_programs",
    "kernels",
    "dims",
    "requests",
    "costs",
    "stage",
    "summary",
    "variants",
    "inter_op",
    "evaluate",
    "intra_op",
    "search",
    "proposers",
    "find_plan",
    "configured",
    "plan_file",
)
"""The folders and top modules of planner/: each imports at run time only those before it.

``evaluate`` stands before the search, so it prices a plan without them.
"""


PASSES = (
    "ops",
    "initialization",
    "programs",
    "graph_passes",
    "tracing",
    "capture",
    "backward",
    "local",
    "memory",
)
"""The folders of passes/, in the same way."""


RUNTIME = (
    "messages",
    "data",
    "checkpoint",
    "launch",
    "parameters",
    "update",
    "step",
    "servers",
    "verify",
    "profile",
    "script_parts",
)
"""The folders of runtime/, in the same way."""


COST_MODEL = ("simulator", "cluster", "collectives", "ops", "profile")
"""The folders of cost_model/, in the same way."""


API = (
    "options",
    "commands",
    "target",
    "calls",
    "cache",
    "placers",
    "planning",
    "profiling",
    "analysis",
    "report",
    "html",
    "training",
    "doctor",
    "exporting",
    "systems",
    "script",
    "adoption",
    "launching",
    "testing",
    "agents",
    "actions",
    "__main__",
)
"""The folders of api/, in the same way."""


ORDERS = {
    "cost_model": COST_MODEL,
    "planner": PLANNER,
    "passes": PASSES,
    "runtime": RUNTIME,
    "api": API,
}
