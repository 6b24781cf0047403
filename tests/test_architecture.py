"""The shape of the package: imports without circles, one class for each name."""

from __future__ import annotations

import ast
import contextlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx

import fedkeep
from fedkeep.interface.algorithm import algorithms

PACKAGE = Path(fedkeep.__file__).parent
ROOT = Path(__file__).resolve().parents[1]


def test_imports_form_no_circle() -> None:
    """Imports for type checkers alone count too: who reads one module of a circle has to read them all."""
    graph = grimp.build_graph("fedkeep", cache_dir=None)
    edges = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    circles = [
        sorted(part) for part in networkx.strongly_connected_components(networkx.DiGraph(edges)) if len(part) > 1
    ]
    assert circles == []


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


MAX_ATTRIBUTES, MAX_OPTIONS = 12, 15
LARGER = {
    "RayExecutor": 14,
    "Recipe": 24,
    "ClientContext": 13,
    "CatalogEntry": 14,
    "ModelRunner": 14,
    "LocalServer": 13,
}
"""Classes that have more than they should, and how many they have: these numbers only fall."""


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the fields of a dataclass, and what the methods of a class assign to ``self``."""
    found = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    }
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        declared = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        found |= {ast.unparse(part.target) for part in declared if "ClassVar" not in ast.unparse(part.annotation)}
    return found


def test_no_class_has_more_attributes_than_a_reader_holds() -> None:
    """What a class inherits counts too. Dataclasses of options may have more: a user sets them one by one."""
    nodes: dict[str, ast.ClassDef] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def lineage(name: str) -> set[str]:
        node = nodes.get(name)
        bases = [ast.unparse(base).split("[")[0] for base in node.bases] if node else []
        return {name}.union(*(lineage(base) for base in bases if base != name))

    too_large = {}
    for name in nodes:
        family = lineage(name)
        count = len(set[str]().union(*(attributes(nodes[base]) for base in family if base in nodes)))
        most = MAX_OPTIONS if "Options" in family else MAX_ATTRIBUTES
        if count > most:
            too_large[name] = count
    assert too_large == LARGER


def texts_of_python(path: Path) -> Iterator[ast.Module]:
    """Yield what a file holds of Python: itself, the texts in it that are Python, or the examples of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        sources = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    else:
        yield (whole := ast.parse(text))
        strings = (node.value for node in ast.walk(whole) if isinstance(node, ast.Constant))
        sources = [value for value in strings if isinstance(value, str) and "class " in value]
    for source in sources:
        with contextlib.suppress(SyntaxError):
            yield ast.parse(textwrap.dedent(source))


def test_no_two_files_of_tests_and_pages_define_methods_of_one_name() -> None:
    """One process may run both files, and then refuses every recipe: methods are found by name."""
    files = sorted(file for folder in ("tests", "docs") for file in (ROOT / folder).rglob("*.[pm][yd]"))
    classes = [
        (path, node, {ast.unparse(base).partition("[")[0] for base in node.bases})
        for path in files
        for tree in texts_of_python(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    # Of the package alone: which methods of tests are known depends on which tests this process has run.
    known = {"Algorithm", *(cls.__name__ for cls in algorithms().values() if cls.__module__.startswith("fedkeep."))}
    while heirs := {node.name for _, node, bases in classes if bases & known} - known:
        known |= heirs
    homes: dict[str, set[str]] = defaultdict(set)
    for path, node, bases in classes:
        if bases & known:
            given = re.search(r"^ +title(?:: .*)? = ['\"](.+)['\"]$", ast.unparse(node), re.M)
            name = (given[1] if given else node.name).lower().replace("+", "-").replace(" ", "-")
            homes[name].add(path.relative_to(ROOT).as_posix())
    assert len(homes) > 30
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
