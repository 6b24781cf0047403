"""Compiled training steps against the loop: the same steps, up to rounding."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_conformance import VARIANTS
from torch import nn

import fedkeep
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.training.compiled_training import TorchCompiler, steps_in_graph
from fedkeep.trials.autotune import choose_compiled_steps

QUICK = ("fedavg", "sfedkd", "fedskf")
"""Methods without a teacher, with several, and with more in each step."""
OTHERS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in VARIANTS]
ONE_BY_ONE = ("cwc-si", "fedweit")
"""Methods with a callback in every step, and with weights that are computed from others."""


def trained(method: Any, num_steps: int, backend: str = "eager", **changes: Any) -> tuple[Any, list[Any]]:
    """Run three rounds with so many steps in a graph; return the simulation and its graphs."""
    simulation = tiny.simulation(method, **{"rounds": 3, "cohort_size": 4, "training": tiny.SHORT, **changes})
    for context in simulation.contexts:
        if num_steps:
            context.compiler = TorchCompiler(context.runner, simulation.settings.training, num_steps, backend)
    for _ in range(3):
        simulation.run_round()
    compiler = simulation.context.compiler
    return simulation, [] if compiler is None else list(compiler._graphs.values())


def check_near(found: Any, expected: Any) -> None:
    for name, weight in expected.server.model.items():
        torch.testing.assert_close(found.server.model[name], weight, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_takes_the_same_steps(name: str) -> None:
    loop, _ = trained(VARIANTS[name], 0)
    compiled, graphs = trained(VARIANTS[name], 2)
    check_near(compiled, loop)
    assert bool(graphs) == (name not in ONE_BY_ONE)
    assert None not in graphs, "each form of loss was traced"
    assert len(graphs) <= 2, "one graph serves all clients and rounds, or one without teachers and one with"


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.9, "weight_decay": 0.01}, {"max_grad_norm": 0.1}, {"lr": 0.05, "lr_decay": 0.5}]
)
def test_every_setting_of_sgd_is_compiled(settings: dict[str, Any]) -> None:
    training = replace(tiny.SHORT, **settings)
    loop, _ = trained(VARIANTS["fedavg"], 0, training=training)
    compiled, graphs = trained(VARIANTS["fedavg"], 2, training=training)
    check_near(compiled, loop)
    assert len(graphs) == 1


def test_a_network_with_random_numbers_is_trained_step_by_step() -> None:
    size = torch.Size(tiny.SHAPE).numel()
    factory = lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(size, tiny.CLASSES))  # noqa: E731
    loop, _ = trained(VARIANTS["fedavg"], 0, factory=factory)
    compiled, graphs = trained(VARIANTS["fedavg"], 2, factory=factory)
    assert graphs == [None]
    for name, weight in loop.server.model.items():
        assert torch.equal(compiled.server.model[name], weight), "the very same random numbers"


@pytest.mark.parametrize(("examples", "expected"), [([50], 5), ([160, 170, 180], 8), ([90], 8), ([4], 1), ([130], 6)])
def test_a_graph_fits_the_median_client(examples: list[int], expected: int) -> None:
    full = sorted(examples)[len(examples) // 2] // 10
    assert steps_in_graph(examples, 10) == expected
    assert expected == 1 or full % expected <= 1


def test_compiling_is_chosen_where_it_pays() -> None:
    long = {"rounds": 10**6, "cohort_size": 4, "training": tiny.SHORT}

    def seconds(compiled: float, plain: float) -> Any:
        return lambda state, clients: compiled if state.context.compiler else plain

    def chosen(measure: Any, **changes: Any) -> int:
        return choose_compiled_steps(tiny.simulation(VARIANTS["fedavg"], **{**long, **changes}), alone=measure)

    assert chosen(seconds(0.001, 0.002)) >= 1
    assert chosen(seconds(0.0018, 0.002)) == 0, "it must be 1.2 times as fast"
    assert chosen(seconds(0.001, 0.002), rounds=5) == 0, "a short run does not pay for compiling"
    assert chosen(seconds(1.0, 9.0)) == 0, "long steps gain nothing"
    assert chosen(seconds(0.001, 0.002), training=replace(tiny.SHORT, optimizer="adam", momentum=0.0)) == 0


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile"):
        Machine(compile="yes")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_machine_code_takes_the_same_steps_and_a_resume_keeps_it(tmp_path: Path) -> None:
    """With teachers, whose outputs have another length at each client; alone and with two processes."""
    settings = ["run.cohort_size=4", "run.rounds=4", "training.batch_size=4"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "sfedkd"], settings=settings)
    fedkeep.run(recipe, out=tmp_path / "loop", machine=Machine(stack=1, compile="off"))
    fedkeep.run(recipe, out=tmp_path / "whole", machine=Machine(stack=1, compile="on"))
    fedkeep.run(recipe, out=tmp_path / "two", machine=Machine(stack=1, compile="on", workers=2))
    calls: list[Any] = []

    def stop(progress: Any) -> None:
        calls.append(progress)
        if len(calls) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedkeep.run(recipe, out=tmp_path / "cut", machine=Machine(stack=1, compile="on"), on_progress=stop)
    fedkeep.resume(tmp_path / "cut", machine=Machine(compile="off"))
    for trial in ("fedavg-seed0", "sfedkd-seed0"):
        folders = {run: tmp_path / run / "trials" / trial for run in ("loop", "whole", "two", "cut")}
        assert json.loads((folders["cut"] / "trial.json").read_text())["compiled_steps"] > 0
        models = {run: (folder / "model.safetensors").read_bytes() for run, folder in folders.items()}
        assert models["whole"] == models["two"] == models["cut"]
        assert models["whole"] != models["loop"], "rounding differs, so machine code was used"
