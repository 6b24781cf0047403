"""Randomness has names, and nothing in the package touches a global generator, pickles, evaluates or prints."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from each import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkeep
from fedkeep._utils import seeds

PACKAGE = Path(fedkeep.__file__).parent
names = st.tuples(
    st.integers(0, 2**63),
    st.text(max_size=4),
    st.integers(0, 99),
    st.integers(0, 99),
    st.text(max_size=4),
    st.integers(0, 9),
)


def derived(name: tuple[int, str, int, int, str, int]) -> int:
    seed, purpose, task, round, client, use = name
    return seeds.derive(seed, purpose, task=task, round=round, client=client, use=use)


@settings(deadline=None, database=None)
@given(names, names)
def test_two_names_are_two_seeds(
    a: tuple[int, str, int, int, str, int], b: tuple[int, str, int, int, str, int]
) -> None:
    assert (derived(a) == derived(b)) == (a == b)


def test_no_field_can_imitate_another() -> None:
    texts = ["", "1", "11", "1:1", "0:", "1:a", "a", "0:0:", ":", "|", "batches", "batches1"]
    found = {derived((s, p, t, r, c, 0)) for s, p, t, r, c in product((1, 11), texts, (1, 11), (1, 11), texts)}
    assert len(found) == 2 * 12 * 2 * 2 * 12


def test_seeds_stay_what_they_are() -> None:
    """They are part of every published result: changing one changes them all."""
    assert seeds.derive(0, "batches", task=1, round=2, client="3", use=4) == derived((0, "batches", 1, 2, "3", 4))
    assert seeds.derive(0, "cohort", round=1) == 5381159917485798232
    assert 0 <= seeds.derive(2**80, "x") < 2**63


def test_generators_start_where_their_name_says() -> None:
    one, two = (seeds.rng(1, "x", client="7") for _ in range(2))
    assert torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=two))
    assert not torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=seeds.rng(1, "x", client="8")))
    first, second = (seeds.numpy_rng(1, "x").random(9) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, seeds.numpy_rng(1, "y").random(9))


def test_borrowed_draws_are_those_of_the_seed_and_leave_no_trace() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    with seeds.temporary_seed(7):
        inside = torch.rand(4)
        with seeds.temporary_seed(8):
            torch.rand(4)
        rest = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1][1])  # noqa: NPY002
    assert random.getstate() == before[2]
    expected = torch.rand(8, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.cat([inside, rest]), expected)
    with pytest.raises(RuntimeError), seeds.temporary_seed(7):
        torch.cat([torch.rand(4), torch.rand(4, 1)])
    assert torch.equal(torch.get_rng_state(), before[0])


# What no file of the package may do. Names are looked at as Python sees them: comments may
# say what they like.

FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "print",
    "breakpoint",
    "input",
    "torch.load",
    "torch.save",
    "torch.manual_seed",
    "torch.seed",
    "torch.random.manual_seed",
    "torch.set_rng_state",
    "torch.use_deterministic_algorithms",
    "torch.cuda.manual_seed_all",
    "torch.set_default_dtype",
    "torch.set_default_device",
    "numpy.load",
    "numpy.save",
    "os.system",
    "torch.hub.load",
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "random", "torch.hub"}
ALLOWED = {("_utils/seeds.py", "torch.cuda.manual_seed"), ("data/arrays.py", "numpy.load")}
NUMPY_ALLOWED = {"numpy.random.Generator", "numpy.random.PCG64"}


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return "?"


# It reads the global generators, to refuse networks that draw from them.
READS = ("models/trial_step.py: import random", "models/trial_step.py: numpy.random.get_state")


def faults(source: str, file: str = "x.py") -> Iterator[str]:
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                if alias.name.split(".")[0] in FORBIDDEN_MODULES or alias.name in FORBIDDEN_MODULES:
                    yield f"{file}:{node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if node.module.split(".")[0] in FORBIDDEN_MODULES:
                yield f"{file}:{node.lineno}: from {node.module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func, aliases)
            if name in FORBIDDEN_CALLS and (file, name) not in ALLOWED:
                yield f"{file}:{node.lineno}: {name}"
            if any(k.arg == "allow_pickle" and getattr(k.value, "value", True) is not False for k in node.keywords):
                yield f"{file}:{node.lineno}: allow_pickle"
            if name == "torch.cuda.manual_seed" and (file, name) not in ALLOWED:
                yield f"{file}:{node.lineno}: {name}"
        if isinstance(node, ast.Attribute):
            name = dotted(node, aliases)
            if name.startswith("numpy.random.") and name not in NUMPY_ALLOWED:
                yield f"{file}:{node.lineno}: {name}"
            if name == "torch.default_generator" and file != "_utils/seeds.py":
                yield f"{file}:{node.lineno}: {name}"


@for_each(sorted(PACKAGE.rglob("*.py")))
def test_no_file_seeds_pickles_evaluates_or_prints(path: Path) -> None:
    found = faults(path.read_text(), str(path.relative_to(PACKAGE)))
    assert [fault for fault in found if not re.sub(r":\d+:", ":", fault).startswith(READS)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.manual_seed(1)",
        "from torch import manual_seed as m\nm(1)",
        "import numpy as np\nnp.random.seed(1)",
        "import numpy\nnumpy.random.rand(3)",
        "import random",
        "from random import seed",
        "import pickle as p",
        "from pickle import loads",
        "import torch as t\nt.load('x')",
        "eval('1')",
        "exec('1')",
        "print('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import torch\ntorch.default_generator.manual_seed(1)",
        "import torch.cuda\ntorch.cuda.manual_seed(1)",
    ],
)
def test_the_lint_sees_it(source: str) -> None:
    assert list(faults(source))
