"""``fedkeep new-method``: write a method of the user's own and its test, which pass and are to be changed."""

from __future__ import annotations

import keyword
import re
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.files import atomic_write
from fedkeep.cli.text import say
from fedkeep.errors import ConfigError, RunError
from fedkeep.interface import algorithms

PARALLEL = '''"""{name}: say in one line what is new."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.aggregation import ema, weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class {name}(Algorithm):
    """Federated averaging that keeps a part of the former model; change it."""

    title = "{name}"
    paper = "yours"

    inertia: float = option(0.0, "weight of the former model in the new one", low=0.0, high=0.99)

    def round(self, server: Server, cohort: Cohort) -> None:
        """The server half: ask the clients, and leave the new model in server.model."""
        replies = cohort.ask(self.train, server.model)
        server.model = ema(server.model, weighted_mean(replies), self.inertia)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """The client half: what is returned is all that leaves the client."""
        return client.fit(model, CrossEntropy())
'''

SEQUENTIAL = '''"""{name}: say in one line what is new."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeep.aggregation import ema
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class {name}State:
    """What the server keeps from round to round: the mean of the rounds' models; empty before the first."""

    mean: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class {name}(Algorithm[{name}State]):
    """One model goes from client to client, and a moving average over the rounds is evaluated; change it."""

    title = "{name}"
    paper = "yours"
    sequential = True

    decay: float = option(0.5, "share of the mean that stays in each round", low=0.0, high=0.99)
    @property
    def sets_eval_model(self) -> bool:
        """What counts is not server.model, the last client's, but what round() puts into server.eval_model."""
        return True

    def round(self, server: Server[{name}State], cohort: Cohort) -> None:
        """The server half: ask one client after the other, and leave the new model in server.model."""
        for client in cohort:
            fit = client.ask(self.train, server.model)
            if fit is not None:  # a client that is lost replies None, and is skipped
                server.model = fit.model
        server.state.mean = ema(server.state.mean, server.model, self.decay)
        server.eval_model = server.state.mean

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """The client half: what is returned is all that leaves the client."""
        return client.fit(model, CrossEntropy())
'''

TEST = '''"""What every method must keep, and what makes {name} different."""

import pytest
from {module} import {name}

from fedkeep.testing import checks_for


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in checks_for({name})])
def test_it_keeps_what_every_method_must(check):
    check()
'''


def write(options: Namespace, console: Console) -> int:
    """Write a method and its test."""
    name: str = options.name
    if not name.isidentifier() or keyword.iskeyword(name) or not name[0].isupper():
        raise ConfigError(f"NAME is the name of a Python class, such as MyMethod, not {name!r}.")
    if name.lower() in algorithms():
        raise ConfigError(f"there is a method {name.lower()!r} already (fedkeep methods). Choose another name.")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    folder = Path(options.out)
    method_text = SEQUENTIAL if options.sequential else PARALLEL
    files = {folder / f"{module}.py": method_text, folder / f"test_{module}.py": TEST}
    for path in files:
        if path.exists():
            raise RunError(f"{path} exists. Choose another name, or another folder with --out.")
    for path, text in files.items():
        atomic_write(path, text.format(name=name, module=module))
    method, test = files
    say(console, f"wrote {method} and {test}. Try them:")
    run = f"fedkeep run --use {method} --methods {'fedseq' if options.sequential else 'fedavg'},{name.lower()}"
    say(console, f"  {run}\n  python -m pytest {test}")
    return 0
