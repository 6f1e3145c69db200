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
from pathlib import Path

import pytest
import structure
from ceilings import CEILINGS
from documents import blocks
from package_order import ORDERS
from structure import (
    MAX_FILE_LINES,
    PACKAGES,
    ROOT,
    count_op_collections,
    find_imports,
    imports,
    measure_repository,
    module_name,
    sources,
)

import autoparallel

TORCH_FREE = {"cost_model", "planner"}


PUBLIC = {
    "AutoparallelError",
    "Callback",
    "CaptureError",
    "DeviceMemoryError",
    "HangError",
    "InfeasibleError",
    "JsonLines",
    "MachineError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "RunError",
    "Step",
    "TensorBoard",
    "TimeLimitError",
    "UsageError",
    "VerificationError",
    "WeightsAndBiases",
    "WorkerError",
    "__version__",
    "compare",
    "describe",
    "distribute",
    "estimate",
    "export",
    "load",
    "load_plan",
    "one_process",
    "own_folder",
    "parallelize",
    "plan",
    "profile",
    "register_op",
    "register_schedule",
    "save",
    "save_plan",
    "whole",
}


def package_of(module: str) -> str | None:
    """Return the top-level package of a module, None for a module of another project."""
    root, *rest = module.split(".")
    if root != "autoparallel":
        return None
    return rest[0] if rest and rest[0] in PACKAGES else "api"


def test_packages_import_only_what_stands_before_them() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module, _ in imports(path)
        if (package := package_of(module)) is not None
        and PACKAGES.index(package) > PACKAGES.index(path.relative_to(ROOT).parts[0])
    ]
    assert wrong == []


@pytest.mark.parametrize(("package", "order"), ORDERS.items())
def test_units_of_a_package_import_only_what_stands_before_them(
    package: str, order: tuple[str, ...]
) -> None:
    """A unit is a folder of the package or a module at its top."""
    paths = sorted((ROOT / package).rglob("*.py"))
    units = {path.relative_to(ROOT / package).with_suffix("").parts[0] for path in paths}
    assert units - {"__init__"} == set(order)
    wrong = []
    for path in paths:
        unit = path.relative_to(ROOT / package).with_suffix("").parts[0]
        for module, when in imports(path):
            names = module.split(".")[1 if package == "api" else 2 :]
            is_own = package_of(module) == package and names and names[0] in units
            if is_own and when != "types" and order.index(names[0]) > order.index(unit):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_below_the_api_packages_import_each_other_relatively() -> None:
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
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_every_error_code_is_documented_once() -> None:
    raised = {code for path in sources() for code in re.findall(r'"(AP\d{3})"', path.read_text())}
    text = (ROOT / "docs/errors.md").read_text()
    documented = re.findall(r"^\| (AP\d{3}) \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(raised)


def test_the_readmes_commands_exist() -> None:
    import typer.main

    from autoparallel.__main__ import app
    from autoparallel.commands.help import leaf_commands

    known = set(leaf_commands(typer.main.get_command(app)))
    text = (ROOT / "README.md").read_text()
    lines = "\n".join(each for block in blocks("README.md") for each in block.commands)
    used = re.findall(r"^(?:.*&& )?autoparallel ((?:show )?\w+)", lines, re.MULTILINE)
    assert set(used) == known
    files = set(
        re.findall(r"examples/\w+\.py|docs/\w+\.md|constraints\.txt|CONTRIBUTING\.md", text)
    )
    assert {name for name in files if not (ROOT / name).exists()} == set()


MAX_WORDS = 2500
"""Of a document, without the bars of its tables."""

REFERENCES = {"errors.md", "cli.md"}
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
    command = "pip install -c constraints.txt -e '.[dev]' && pytest -n 3"
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
    module, runner = importlib.import_module(module_name(path)), doctest.DocTestRunner()
    for docstring in doctest.DocTestFinder().find(module):
        if docstring.examples:
            runner.run(docstring)
    assert runner.tries > 0
    assert runner.failures == 0


FOREIGN = frozenset(
    {
        "ramp",
        "layer_idx",
        "output_padding",
        "_scaled_dot_product_attention_math",
        "_unexpected",
        "OP__NUMBER__INPUTS_to_OUTPUTS",
        "check_os_kernel",
    }
)
"""Names in docstrings that are of torch, of models, or of formulas."""


def test_the_list_of_slow_tests_names_tests() -> None:
    listed = (ROOT / "tests" / "slow_tests.txt").read_text().splitlines()
    names = [line.partition("[")[0] for line in listed if not line.startswith("#")]
    files = {name.partition("::")[0] for name in names}
    found = {
        f"{file}::{name}"
        for file in files
        for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    }
    assert set(names) - found == set()


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
    """Every name in the code of the repository, and the docstrings of the packages."""
    known = set(FOREIGN) | set(dir(builtins)) | set(keyword.kwlist)
    docstrings: list[tuple[Path, str]] = []
    for folder in (*PACKAGES, "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            known.update(path.relative_to(ROOT).with_suffix("").parts)
            own: dict[int, str] = {}
            for node in ast.walk(tree):  # a statement comes before the text that it is
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        own[id(node.value)] = text
                    case _ if id(node) not in own:
                        known.update(_names(node))
            if folder in PACKAGES:
                docstrings += [(path, text) for text in own.values()]
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


def test_every_figure_of_the_structure_has_a_ceiling() -> None:
    assert [name for name, *_ in CEILINGS] == list(measure_repository())


def test_the_figures_are_printed_beside_their_ceilings(capsys: pytest.CaptureFixture[str]) -> None:
    structure.main()
    lines = capsys.readouterr().out.splitlines()
    for (name, ceiling, *reason), line in zip(CEILINGS, lines[1:], strict=False):
        words = [*name.split(), str(measure_repository()[name]), str(ceiling), *reason]
        assert line.split() == " ".join(words).split()


def test_no_figure_of_the_structure_is_above_its_ceiling() -> None:
    figures = measure_repository()
    above = [
        f"{name}: {figures[name]} today, ceiling {ceiling}"
        for name, ceiling, *_ in CEILINGS
        if figures[name] > ceiling
    ]
    advice = (
        "Make the figure smaller, or raise its ceiling in CEILINGS of tests/support/ceilings.py "
        "with the reason beside it; `make structure` prints all figures."
    )
    assert not above, "\n".join(["figures above their ceilings", *above, advice])


def test_ceilings_of_the_structure_follow_figures_that_fall() -> None:
    """A ceiling is at most 2 % above its figure, so below 50 it equals the figure."""
    figures = measure_repository()
    high = [
        f"lower the ceiling of {name!r} in CEILINGS from {ceiling} to {figures[name]}"
        for name, ceiling, *_ in CEILINGS
        if 100 * ceiling > 102 * figures[name]
    ]
    assert not high, "\n".join(["ceilings more than 2 % above their figures", *high])


def test_the_structure_knows_when_an_import_runs() -> None:
    code = """
from ..cost_model.ops import memory
if TYPE_CHECKING:
    from .graph import Graph
else:
    import autoparallel.planner.plan
def price():
    from . import errors, summary
    if TYPE_CHECKING:
        import torch
"""
    assert list(find_imports(ast.parse(code), ["autoparallel", "planner"])) == [
        ("autoparallel.cost_model.ops.memory", "import"),
        ("autoparallel.planner.graph.Graph", "types"),
        ("autoparallel.planner.plan", "import"),
        ("autoparallel.planner.errors", "call"),
        ("autoparallel.planner.summary", "call"),
        ("torch", "types"),
    ]


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("OPS = {'view', 'reshape'}", 1),
        ("OPS = {'shape': ('view.default', 'reshape.default'), 'sum': ('mm', 'bmm')}", 1),
        ("OPS = frozenset('view reshape'.split())", 1),
        ("def price(op, matmul=('mm', 'bmm')):\n    return op in ('view', 'reshape')", 2),
        ("OPS = ('view', 'view.dtype', 'other')", 0),
    ],
)
def test_the_structure_counts_the_outermost_collections_of_op_names(code: str, number: int) -> None:
    assert count_op_collections(ast.parse(code)) == number
