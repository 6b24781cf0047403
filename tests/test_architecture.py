"""The shape of the package: imports without circles, one class for each name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import grimp
import networkx

import fedkeep

PACKAGE = Path(fedkeep.__file__).parent


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
