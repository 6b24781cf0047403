"""Docstrings outside the Python reference are short: what tools/docstrings.py would change is nothing."""

from __future__ import annotations

import runpy
from pathlib import Path

from each import for_each

ROOT = Path(__file__).parents[1]
shorten = runpy.run_path(str(ROOT / "tools" / "docstrings.py"))


@for_each(sorted((ROOT / "fedkeep").iterdir()))
def test_only_the_reference_has_sections(path: Path) -> None:
    names = shorten["reference"]()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.name.endswith(".py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert shorten["rewritten"](file.read_text(), module, names) == file.read_text(), (
            "run python tools/docstrings.py"
        )


def test_an_entry_stays_if_it_tells_what_a_type_cannot() -> None:
    source = '''def mean(values, count, name):
    """Return the mean.

    Parameters
    ----------
    values : Tensor
        [clients, classes].
    count : int
        The count.
    name : str or None
        None for all.

    Returns
    -------
    Tensor
        The mean.
    """
'''
    expected = '''def mean(values, count, name):
    """Return the mean.

    ``values``: [clients, classes].
    ``name``: None for all.
    """
'''
    assert shorten["rewritten"](source, "fedkeep.example", set()) == expected
    assert shorten["rewritten"](source, "fedkeep.example", {"fedkeep.example.mean"}) == source
