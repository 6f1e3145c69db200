"""Structure of the repository: sizes, flat folders, import cycles, docstrings and words as figures.

In: the files of the repository, read as text. Out: ``measure_repository()``, a number for each
name, which ``tests/test_repository.py`` compares with ``CEILINGS`` of ``ceilings``. As a script
(``make structure``) it prints the figures beside their ceilings, and the files of each import
cycle. It imports neither torch nor the package that it measures.

An import cycle is a strongly connected component of several files in the graph of their imports,
imports inside functions included and imports under ``TYPE_CHECKING`` excluded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cost_model", "planner", "passes", "runtime", "api")
"""Top-level packages: each imports only packages before it."""

ALL_PACKAGES = "all packages"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
SMALL_FILE_LINES = 80

OP_RECORDS = ("planner", "ops")
"""Folder of the records of ops: collections of op names are counted in all other folders."""

OP_NAMES = frozenset(
    {
        "linear",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "matmul",
        "embedding",
        "scaled_dot_product_attention",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "batch_norm",
        "instance_norm",
        "softmax",
        "log_softmax",
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "cat",
        "stack",
        "split",
        "split_with_sizes",
        "chunk",
        "slice",
        "select",
        "narrow",
        "gather",
        "scatter",
        "index_select",
        "index_put",
        "index_add",
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss_nd",
        "cumsum",
        "dropout",
        "permute",
        "transpose",
        "t",
        "expand",
        "repeat",
        "repeat_interleave",
        "unsqueeze",
        "squeeze",
        "unbind",
        "one_hot",
        "arange",
        "roll",
        "flip",
        "sort",
        "topk",
        "masked_fill",
        "where",
    }
)

GENERATED = "<!-- Generated"
"""How the first line of a page begins that a program writes from the code."""

CLAUSE = re.compile(r"(What|Whether|Which|Who|How|Those|Of|By|Where|If|For|In|With|As)\b")
"""Beginning of a docstring that names neither an action nor a thing first."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

FUNCTION_FIGURES: Mapping[str, Callable[[FunctionNode], bool]] = {
    f"functions over {MAX_FUNCTION_LINES} lines": (
        lambda node: _num_lines(node) > MAX_FUNCTION_LINES
    ),
    f"functions over {MAX_PARAMETERS} parameters": (
        lambda node: _num_parameters(node) > MAX_PARAMETERS
    ),
    "function docstrings that begin with a clause": (
        lambda node: CLAUSE.match(ast.get_docstring(node) or "") is not None
    ),
    'function docstrings with "what"': (
        lambda node: re.search(r"\b[Ww]hat\b", ast.get_docstring(node) or "") is not None
    ),
}
"""Figures that count functions, methods and inner functions included."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Counts and imports of a Python file of a package; ``imports()`` explains the pairs."""

    path: Path
    module: str
    num_lines: int
    imports: tuple[tuple[str, str], ...]
    num_op_collections: int
    num_format_exceptions: int
    num_functions: Mapping[str, int]
    """Number of functions for each name of ``FUNCTION_FIGURES``."""

    @property
    def package(self) -> str:
        """Name of the top-level package that contains the file."""
        return self.path.relative_to(ROOT).parts[0]

    @property
    def is_flat(self) -> bool:
        """Tell whether the file lies directly in the folder of its package, beside __init__.py."""
        return self.path.parent.parent == ROOT and self.path.name != "__init__.py"

    @property
    def num_inner_imports(self) -> int:
        """Number of names that functions of the file import from the packages."""
        return sum(when == "call" and _is_own(target) for target, when in self.imports)


PACKAGE_FIGURES: Mapping[str, Callable[[SourceFile], int]] = {
    "lines": lambda file: file.num_lines,
    "files": lambda file: 1,
    "flat files": lambda file: file.is_flat,
    "imports inside functions": lambda file: file.num_inner_imports,
    "collections of op names": lambda file: file.num_op_collections,
}
"""Figures of each package and of all together, as the value that a file adds."""


@cache
def sources() -> tuple[Path, ...]:
    """Return the paths of the Python files of all packages."""
    return tuple(sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")))


def module_name(path: Path) -> str:
    """Return the name that a file of a package is imported by."""
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [*([] if package == "api" else [package]), *rest]
    return ".".join(["autoparallel", *(part for part in parts if part != "__init__")])


def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the imports of a file of a package as pairs (target, when).

    ``target`` is the absolute name of a module, or of a name in a module: ``from .graph import
    Graph`` has the target ``autoparallel.planner.graph.Graph``. ``when`` is "import" (of the file
    itself), "call" (of a function) or "types" (under ``TYPE_CHECKING``: never).
    """
    return read_source(path).imports


@cache
def read_source(path: Path) -> SourceFile:
    """Read a file of a package and count its contents."""
    text = path.read_text()
    tree = ast.parse(text)
    module = module_name(path)
    parts = module.split(".")
    functions = [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]
    is_op_record = path.relative_to(ROOT).parts[:2] == OP_RECORDS
    return SourceFile(
        path=path,
        module=module,
        num_lines=text.count("\n"),
        imports=tuple(find_imports(tree, parts if path.name == "__init__.py" else parts[:-1])),
        num_op_collections=0 if is_op_record else count_op_collections(tree),
        num_format_exceptions=len(re.findall(r"# fmt: (?:skip|off)", text)),
        num_functions={
            name: sum(map(is_counted, functions)) for name, is_counted in FUNCTION_FIGURES.items()
        },
    )


def find_imports(tree: ast.AST, package: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the imports of a syntax tree, relative imports resolved from ``package``."""
    for node, when in _import_statements(tree, "import"):
        base: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base += package[: len(package) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
        for alias in node.names:
            yield ".".join([*base, alias.name]), when


def _import_statements(
    node: ast.AST, when: str
) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yield each import statement below a node, with the time at which it runs."""
    if isinstance(node, FunctionNode) and when == "import":
        when = "call"
    type_only: list[ast.AST] = []
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        type_only += node.body
    for child in ast.iter_child_nodes(node):
        child_when = "types" if child in type_only else when
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, child_when
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _import_statements(child, child_when)


def _is_own(target: str) -> bool:
    return target.split(".")[0] == "autoparallel"


def _num_lines(node: FunctionNode) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _num_parameters(node: FunctionNode) -> int:
    arguments = node.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def count_op_collections(node: ast.AST) -> int:
    """Count the collections that name at least two ops: literals, and strings that are split.

    Of nested collections the outermost one counts.
    """
    match node:
        case ast.Dict() | ast.Set() | ast.List() | ast.Tuple():
            is_collection = True
        case ast.Call(func=ast.Attribute(attr="split")):
            is_collection = True
        case _:
            is_collection = False
    if is_collection and len(_op_names(node)) >= 2:
        return 1
    return sum(map(count_op_collections, ast.iter_child_nodes(node)))


def _op_names(node: ast.AST) -> set[str]:
    """Return the ops named by the strings below a node, overloads (``view.default``) included."""
    constants = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
    texts = (each.value for each in constants if isinstance(each.value, str))
    return {word.split(".")[0] for text in texts for word in text.split()} & OP_NAMES


def build_import_graph(files: Iterable[SourceFile]) -> nx.DiGraph[str]:
    """Build the graph with an edge from each module to each module that it imports when it runs."""
    files = list(files)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(file.module for file in files)
    for file in files:
        targets = (target for target, when in file.imports if when != "types")
        modules = {_longest_module(target, graph) for target in targets} - {"", file.module}
        graph.add_edges_from((file.module, module) for module in modules)
    return graph


def _longest_module(target: str, modules: nx.DiGraph[str]) -> str:
    """Return the module that a target is or lies in, "" for a module outside the packages."""
    parts = target.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((name for name in names if name in modules), "")


def find_import_cycles(graph: nx.DiGraph[str]) -> list[list[str]]:
    """Return the modules of each import cycle, the largest cycle first."""
    components = nx.strongly_connected_components(graph)
    cycles = [sorted(component) for component in components if len(component) > 1]
    return sorted(cycles, key=lambda cycle: (-len(cycle), cycle))


@cache
def measure_repository() -> dict[str, int]:
    """Return all figures of the repository by name."""
    files = [read_source(path) for path in sources()]
    return {
        **_measure_packages(files),
        **_measure_imports(files),
        **_measure_code(files),
        **_measure_documents(),
        **_measure_tests(),
    }


def _measure_packages(files: Sequence[SourceFile]) -> dict[str, int]:
    return {
        f"{package}: {name}": sum(
            count(file) for file in files if package in (file.package, ALL_PACKAGES)
        )
        for package in (*PACKAGES, ALL_PACKAGES)
        for name, count in PACKAGE_FIGURES.items()
    }


def _measure_imports(files: Sequence[SourceFile]) -> dict[str, int]:
    graph = build_import_graph(files)
    cycles = find_import_cycles(graph)
    small = [
        file
        for file in files
        if file.num_lines < SMALL_FILE_LINES and file.path.name != "__init__.py"
    ]
    return {
        "import cycles": len(cycles),
        "files in import cycles": sum(map(len, cycles)),
        f"files under {SMALL_FILE_LINES} lines with a single importer": sum(
            graph.in_degree(file.module) == 1 for file in small
        ),
    }


def _measure_code(files: Sequence[SourceFile]) -> dict[str, int]:
    return {
        f"files over {MAX_FILE_LINES} lines": sum(
            file.num_lines > MAX_FILE_LINES for file in files
        ),
        **{name: sum(file.num_functions[name] for file in files) for name in FUNCTION_FIGURES},
        "exceptions from formatting (fmt: skip, fmt: off)": sum(
            file.num_format_exceptions for file in files
        ),
    }


def _measure_documents() -> dict[str, int]:
    decisions = ROOT / "docs/adr"
    pages = [path for path in (ROOT / "docs").rglob("*.md") if decisions not in path.parents]
    written = [path for path in pages if not path.read_text().startswith(GENERATED)]
    return {
        "pages of docs/ without docs/adr/": len(pages),
        "words of docs/ without docs/adr/ and generated pages": sum(map(_count_words, written)),
        "words of CHANGELOG.md": _count_words(ROOT / "CHANGELOG.md"),
        "words of README.md": _count_words(ROOT / "README.md"),
    }


def _count_words(path: Path) -> int:
    return len(path.read_text().split())


def _measure_tests() -> dict[str, int]:
    paths = list((ROOT / "tests").rglob("*.py"))
    return {
        "tests: lines": sum(path.read_text().count("\n") for path in paths),
        "tests: files": len(paths),
        "tests: flat files": sum(path.parent == ROOT / "tests" for path in paths),
    }


def main() -> None:
    """Print the figures beside their ceilings, then the modules of each import cycle."""
    sys.path.insert(0, str(ROOT / "tests"))
    from ceilings import CEILINGS

    ceilings = {name: (ceiling, *reason) for name, ceiling, *reason in CEILINGS}
    figures = measure_repository()
    width = max(map(len, figures))
    print(f"{'figure':{width}} {'today':>7} {'ceiling':>7}")
    for name, figure in figures.items():
        ceiling, *reason = ceilings.get(name, ("none",))
        print(f"{name:{width}} {figure:>7} {ceiling:>7}", *reason)
    for cycle in find_import_cycles(build_import_graph(map(read_source, sources()))):
        modules = [module.removeprefix("autoparallel.") for module in cycle]
        print(f"\nimport cycle of {len(cycle)} files:", *modules, sep="\n  ")


if __name__ == "__main__":
    main()
