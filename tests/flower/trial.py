"""A tiny run, on one machine and at sites in this process, and what it left."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from local_transport import Tamper
from safetensors.torch import load_file

import fedkeep
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.flower.config import RunConfig
from fedkeep.flower.transport import Envelope, MessageKind

SETTINGS = ("auxiliary.images_per_class=2", "run.cohort_size=4")


def config(
    recipe: str,
    out: Path,
    settings: Sequence[str] = SETTINGS,
    methods: str = "",
    rounds: int = 3,
    min_clients: int = 0,
    **changes: Any,
) -> RunConfig:
    """Return a run configuration; with ``methods``, of a recipe with these."""
    if methods:
        words = shlex.split(" ".join(settings))
        code = changes.get("allow_code", False)
        chosen = load_recipe(recipe, settings=words, methods=methods.split(","), allow_code=code)
        out.parent.mkdir(parents=True, exist_ok=True)
        path = out.parent / f"{methods.replace(',', '-')}.toml"
        path.write_text(chosen.to_toml())
        recipe = str(path)
    settings = [*settings, f"run.rounds={rounds}", *[f"run.min_clients={min_clients}"] * bool(min_clients)]
    usual: dict[str, Any] = {"settings": " ".join(settings), "wait": 0.2, "deadline": 5.0}
    return RunConfig(recipe=recipe, out=str(out), **(usual | changes))


def embedded(recipe: str, method: str, out: Path, rounds: int = 3, settings: Sequence[str] = SETTINGS) -> fedkeep.Run:
    chosen = load_recipe(recipe, settings=settings, methods=[method], rounds=rounds)
    return fedkeep.run(chosen, out=out)


def embedded_once(recipe: str, factory: pytest.TempPathFactory, *given: Any) -> Callable[[str], Path]:
    """Return what gives the folder of a method's `embedded` run, which is run when it is first asked for."""

    @functools.cache
    def run_rounds(method: str) -> Path:
        out = factory.mktemp(method) / "one"
        embedded(recipe, method, out, *given)
        return out

    return run_rounds


def model(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "trials").iterdir()) / "model.safetensors")


def records(run: Path) -> list[dict[str, Any]]:
    lines = (next((run / "trials").iterdir()) / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def killing(after: int) -> Tamper:
    """Kill the server when a site has answered so many calls and answers another."""
    calls = [0]

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, message: Envelope) -> Envelope:
        calls[0] += kind == "perform"
        if calls[0] > after:
            raise Killed
        return message

    return tamper
