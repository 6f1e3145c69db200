"""The order of packages and folders: each imports only what stands before it."""

from __future__ import annotations

PLANNER = (
    "budget",
    "classes",
    "errors",
    "graph",
    "integer_programs",
    "layout",
    "schedules",
    "plan",
    "plan_file",
    "positions",
    "expert_dims",
    "precision",
    "requests",
    "rules",
    "batch",
    "kernels",
    "rules_protocol",
    "replay",
    "summary",
    "written_attention",
    "sequence_places",
    "padding",
    "pricing",
    "asynchronous",
    "block_walk",
    "plan_schedule",
    "replicas",
    "server_shards",
    "parameter_servers",
    "shares",
    "gradient_buckets",
    "gradient_sums",
    "stage_walk",
    "evaluate",
    "gradient_choice",
    "price_sources",
    "intra_op",
    "inter_op",
    "search",
    "proposers",
    "server_offers",
    "find_plan",
    "profiling_targets",
    "configured",
)
"""The folders and top modules of planner/: each imports at run time only those before it.

``evaluate`` stands before the solvers and the search, so it prices a plan without them.
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
