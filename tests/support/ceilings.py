"""Ceilings of the figures of ``tests/support/structure.py``, with reasons why some rose."""

from __future__ import annotations

FOLDERS = "folders instead of flat files, each with a line about it in its __init__.py"
WEIGHTS = (
    "gradients of chosen parameters and random numbers for spread weights, which differed from the "
    "model alone in silence"
)
FORMS = (
    "models whose calls had no plan: arguments and outputs of any form, gradients of inputs and "
    "inside the forward, methods beside it, sparse tensors; public scripts that adopt the product; "
    "trainers that save and resume; gradients of values that an op gives back"
)
PRICES = "prices of experts, of scaled 8-bit products, of groups over several axes; published runs"
CALLS = "calls by *args and **kwargs, dataclasses in batches and outputs"
ROWS = "rows and activations of experts, 16-bit products of scans, experts that are neighbours"
SYSTEMS = "parts that are recomputed, groups that routers choose from, whose training is priced"
FORMATTED = "one formatter, obeyed: no exceptions from formatting"
DECLARED = (
    "commands and their options declared apart from the actions that carry them out; folders of "
    "passes with at most sixteen files"
)
AGENTS = "schemas of the JSON of commands, a server of MCP, estimates kept between commands"
KERNELS = "prices of kernels over products, folded experts, layers of several kinds in a list"

STATED = (
    "docstrings that state units, owners and conditions; weights in NF4, hosts checked by one "
    "doctor, records of ops that are shared"
)

SENT = (
    "tokens that are sent to their experts, in runtime and scripts; one set of terms for all "
    "solvers"
)

EXPERTS = (
    "experts over any axis that splits tokens, states sharded over all ranks that hold a parameter "
    "whole, losses, counts and biases of routers that equal the model alone"
)

HIDDEN = "exchanges of tokens with experts beside compute: in halves, and beside other ops"

DOORS = "three doors in the README: files, commands, a decorator and a script, each run by a test"

LOADS = "experts by measured loads: counted in a run, priced by the busiest rank, with copies"

TILES = "ops at the end of recomputed blocks, computed tile by tile: found, priced and run"

LONG = (
    "sequences of a million positions: losses in tiles, rings, attention's results that are kept, "
    "values in host memory, states sharded within groups"
)

MOVED = "gradients, and parameters under ZeRO 3, in host memory: priced, searched and run"

CEILINGS: tuple[tuple[str, int] | tuple[str, int, str], ...] = (
    ("cost_model: lines", 8781, LONG),
    ("cost_model: files", 46, FOLDERS),
    ("cost_model: flat files", 0, PRICES),
    ("cost_model: imports inside functions", 0),
    ("cost_model: collections of op names", 0),
    ("planner: lines", 34333, LONG),
    ("planner: files", 149, LONG),
    ("planner: flat files", 5),
    ("planner: imports inside functions", 0),
    ("planner: collections of op names", 0, KERNELS),
    ("passes: lines", 19398, LONG),
    ("passes: files", 103, LONG),
    ("passes: flat files", 0),
    ("passes: imports inside functions", 1),
    ("passes: collections of op names", 2, FORMS),
    ("runtime: lines", 19949, LONG),
    ("runtime: files", 88, LONG),
    ("runtime: flat files", 0, WEIGHTS),
    ("runtime: imports inside functions", 0),
    ("runtime: collections of op names", 0),
    ("api: lines", 34296, LONG),
    ("api: files", 194, LONG),
    ("api: flat files", 2),
    ("api: imports inside functions", 12, CALLS),
    ("api: collections of op names", 2),
    ("all packages: lines", 116757, LONG),
    ("all packages: files", 580, LONG),
    ("all packages: flat files", 7),
    ("all packages: imports inside functions", 13, CALLS),
    ("all packages: collections of op names", 4, KERNELS),
    ("import cycles", 0),
    ("files in import cycles", 0),
    ("files under 80 lines with a single importer", 9, EXPERTS),
    ("files over 500 lines", 0, LONG),
    ("functions over 60 lines", 10, FORMATTED),
    ("functions over 8 parameters", 32, LONG),
    ("function docstrings that begin with a clause", 0),
    ('function docstrings with "what"', 10, STATED),
    ("exceptions from formatting (fmt: skip, fmt: off)", 0, KERNELS),
    ("pages of docs/ without docs/adr/", 20, LONG),
    ("words of docs/ without docs/adr/ and generated pages", 30468, LONG),
    ("words of CHANGELOG.md", 354, LONG),
    ("words of README.md", 1453, LONG),
    ("tests: lines", 78837, LONG),
    ("tests: files", 493, LONG),
    ("tests: flat files", 20),
)
"""Name, ceiling, and the reason if it rose."""
