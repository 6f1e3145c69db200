"""The repository as a whole: import order, public names, packaging, documents."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import keyword
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import autoparallel

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cost_model", "planner", "passes", "runtime", "api")
"""Every room imports only those before it."""

TORCH_FREE = {"cost_model", "planner"}
MAX_LINES = 500

PLANNER = (
    "budget", "classes", "errors", "graph", "integer_programs", "layout", "schedules",
    "plan", "plan_file", "positions", "expert_dims", "precision", "requests", "rules", "batch",
    "fusion", "rules_protocol", "replay", "summary", "written_attention", "sequence_places",
    "padding", "pricing", "asynchronous", "block_walk", "plan_schedule", "replicas",
    "server_shards", "parameter_servers", "shares", "gradient_buckets", "gradient_sums",
    "stage_walk", "evaluate", "gradient_choice",
    "price_sources", "intra_op", "inter_op", "search", "proposers", "server_offers",
    "find_plan",
    "profiling_targets", "configured",
)  # fmt: skip
"""The folders and top modules of planner/: each imports at run time only those before it.

``evaluate`` stands before the solvers and the search, so it prices a plan without them.
"""

PASSES = ("ops", "initialization", "programs", "graph_passes", "capture", "local", "memory")
"""The folders of passes/, in the same way."""

PUBLIC = {
    "AutoparallelError", "Callback", "CaptureError", "DeviceMemoryError", "HangError",
    "InfeasibleError", "JsonLines", "MachineError", "ParallelModule", "Plan", "PlanError",
    "RunError", "Step", "TensorBoard", "TimeLimitError", "UsageError", "VerificationError",
    "WeightsAndBiases", "WorkerError", "__version__", "compare", "describe", "distribute",
    "estimate", "export", "load", "load_plan", "one_process", "parallelize", "plan", "profile",
    "register_op", "save", "save_plan",
}  # fmt: skip


@cache
def sources() -> tuple[Path, ...]:
    """Every Python file of the rooms."""
    return tuple(sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")))


def module_name(path: Path) -> str:
    """The name that a file of a room is imported by."""
    room, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [*([] if room == "api" else [room]), *(part for part in rest if part != "__init__")]
    return ".".join(["autoparallel", *(part for part in parts if part != "__init__")])


@cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """What a file imports, absolutely: (module, when).

    ``when`` is "import" (of the file itself), "call" (of a function) or "types" (never).
    """
    tree = ast.parse(path.read_text())
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: list[tuple[str, str]] = []
    when = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when |= {id(inner): "call" for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if _is_type_checking(node):
            when |= {id(inner): "types" for inner in ast.walk(node)}
    for node in ast.walk(tree):
        own = when.get(id(node), "import")
        if isinstance(node, ast.Import):
            found += [(alias.name, own) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((module, own))
            found += [(f"{module}.{alias.name}", own) for alias in node.names]
    return tuple(found)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def room_of(module: str) -> str | None:
    """The room that a module of ours is in; None for others."""
    package, *rest = module.split(".")
    if package != "autoparallel":
        return None
    return rest[0] if rest and rest[0] in ROOMS else "api"


def test_rooms_import_only_what_stands_before_them() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module, _ in imports(path)
        if (room := room_of(module)) is not None
        and ROOMS.index(room) > ROOMS.index(path.relative_to(ROOT).parts[0])
    ]
    assert wrong == []


@pytest.mark.parametrize(("room", "order"), [("planner", PLANNER), ("passes", PASSES)])
def test_units_of_a_room_import_only_what_stands_before_them(
    room: str, order: tuple[str, ...]
) -> None:
    """A unit is a folder of the room or a module at its top."""
    paths = sorted((ROOT / room).rglob("*.py"))
    units = {path.relative_to(ROOT / room).with_suffix("").parts[0] for path in paths}
    assert units - {"__init__"} == set(order)
    wrong = []
    for path in paths:
        unit = path.relative_to(ROOT / room).with_suffix("").parts[0]
        for module, when in imports(path):
            package, own, *names = (*module.split("."), "", "")[:3]
            is_own = (package, own) == ("autoparallel", room) and names[0] in units
            if is_own and when != "types" and order.index(names[0]) > order.index(unit):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_below_the_api_rooms_import_each_other_relatively() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.relative_to(ROOT).parts[0] != "api"
        and re.search(r"^\s*(from|import) autoparallel\b", path.read_text(), re.MULTILINE)
    ]
    assert wrong == []


def test_only_the_runtime_uses_torch_distributed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module, _ in imports(path)
        if (module == "torch.distributed" or module.startswith("torch.distributed."))
        and path.relative_to(ROOT).parts[0] != "runtime"
    ]
    assert wrong == []


def test_the_cost_model_and_the_planner_are_imported_without_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module, when in imports(path)
        if when == "import"
        and module.split(".")[0] == "torch"
        and path.relative_to(ROOT).parts[0] in TORCH_FREE
    ]
    assert wrong == []


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, autoparallel, autoparallel.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_names_are_these() -> None:
    assert set(autoparallel.__all__) == PUBLIC
    assert set(dir(autoparallel)) == PUBLIC
    for name in PUBLIC:
        assert getattr(autoparallel, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = autoparallel.no_such_name


def test_the_packaged_folders_are_the_folders_on_disk() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in sources()}
    assert sorted(settings["packages"]) == sorted(
        module_name(folder / "__init__.py") for folder in folders
    )
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == autoparallel.__version__


def test_no_file_is_longer_than_allowed() -> None:
    files = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_error_code_is_documented_once() -> None:
    raised = {code for path in sources() for code in re.findall(r'"(AP\d{3})"', path.read_text())}
    text = (ROOT / "docs/errors.md").read_text()
    documented = re.findall(r"^\| (AP\d{3}) \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(raised)


def test_the_readmes_commands_exist() -> None:
    from autoparallel.__main__ import app

    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    text = (ROOT / "README.md").read_text()
    blocks = "".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    used = re.findall(r"^(?:.*&& )?autoparallel (\w+) ", blocks, re.MULTILINE)
    assert set(used) == known
    files = set(
        re.findall(r"examples/\w+\.py|docs/\w+\.md|constraints\.txt|CONTRIBUTING\.md", text)
    )
    assert {name for name in files if not (ROOT / name).exists()} == set()


MAX_WORDS = 2500
"""Of a document, without the bars of its tables."""

REFERENCES = {"errors.md", "commands.md", "plan_schema.md", "devices.md"}
"""Documents that are looked things up in, one entry per code, option or field."""


def documents() -> list[Path]:
    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    return [*own, *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("README.md")]


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a document, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_document_is_short_and_listed_in_the_readme() -> None:
    docs = sorted((ROOT / "docs").glob("*.md"))
    words = {path.name: len(re.findall(r"[^\s|]+", path.read_text())) for path in docs}
    assert {
        name: count
        for name, count in words.items()
        if count >= MAX_WORDS and name not in REFERENCES
    } == {}
    listed = set(re.findall(r"\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text()))
    assert {path.name for path in docs} - listed == set()


def test_the_links_of_documents_lead_to_files_and_headings() -> None:
    broken = []
    for path in documents():
        prose = re.sub(r"`[^`\n]*`", "", path.read_text())
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if link.startswith("http"):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append((path.name, link))
    assert broken == []


def test_the_ci_runs_the_readmes_test_command() -> None:
    command = "pip install -c constraints.txt -e '.[dev]' && pytest -n 2"
    assert f"\n{command}\n" in (ROOT / "README.md").read_text()
    assert command.replace(".[dev]", r"\.\[dev\]") in (ROOT / ".ci/run").read_text()


def test_constraints_pin_what_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    required = {re.split(r"[><=!\[; ]", text)[0].lower() for text in project["dependencies"]}
    assert required <= pinned


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if ">>>" in path.read_text()],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_examples_in_docstrings_run(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    assert doctest.testmod(module).failed == 0


FOREIGN = frozenset({
    "ramp", "layer_idx", "output_padding", "_scaled_dot_product_attention_math", "_unexpected",
    "OP__NUMBER__INPUTS_to_OUTPUTS", "check_os_kernel",
})  # fmt: skip
"""Names in docstrings that are of torch, of models, or of formulas."""


def test_names_in_docstrings_exist() -> None:
    """What stands between double backticks and could be a name is one, somewhere."""
    known, docstrings = _names_and_docstrings()
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in docstrings
        for name in re.findall(r"``([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?``", text)
        if not known.issuperset(word for word in name.split(".") if len(word) > 2)
    ]
    assert wrong == []


def _names_and_docstrings() -> tuple[set[str], list[tuple[Path, str]]]:
    """Every name in the code of the repository, and the docstrings of the rooms."""
    known = set(FOREIGN) | set(dir(builtins)) | set(keyword.kwlist)
    docstrings: list[tuple[Path, str]] = []
    for folder in (*ROOMS, "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            own = {
                id(node.value): node.value.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            }  # fmt: skip
            if folder in ROOMS:
                docstrings += [(path, text) for text in own.values()]
            known.update(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(tree):
                if id(node) not in own:
                    known.update(_names(node))
    return known, docstrings


def _names(node: ast.AST) -> list[str]:
    """The names that a node has itself; of a string its words."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.alias(name=name, asname=other):
            return [*name.split("."), *([other] if other else [])]
        case ast.Constant(value=str(text)):
            return re.findall(r"[A-Za-z_]\w*", text)
    return []
