"""FT+KD, EWC+KD and LwF+KD about FedDCL's images: the images are FedDCL's, and all else is theirs."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from fedkeep.algorithms.heterogeneous.ewc_kd import EWCKD
from fedkeep.algorithms.heterogeneous.feddcl import FedDCL
from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
from fedkeep.algorithms.heterogeneous.kd_on_generated_images import (
    EWCKDOnGeneratedImages,
    FTKDOnGeneratedImages,
    LwFKDOnGeneratedImages,
)
from fedkeep.algorithms.heterogeneous.lwf_kd import LwFKD
from fedkeep.algorithms.incremental.generated_replay import select_images
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe_loader import load_recipe

SMALL: dict[str, Any] = {**tiny.PROTOTYPES, "server_images_per_class": 3}


def test_the_images_are_feddcls_of_the_task() -> None:
    stream = tiny.stream((2, 1), absent=0)
    mine, theirs = (
        tiny.simulation_with_tasks(fed, stream, rounds=1, cohort_size=5)
        for fed in (FTKDOnGeneratedImages(**SMALL), FedDCL(**tiny.TOYS["feddcl"]))
    )
    for old, classes in ((0, 2), (2, 3)):
        tiny.run_rounds(mine, 1), tiny.run_rounds(theirs, 1)
        generated = mine.server.state.generated
        expected = select_images(theirs.server.state.pool, old, classes, 3)  # type: ignore[attr-defined]
        assert torch.equal(generated["input"], expected["input"])
        assert torch.equal(generated["label"], expected["label"])
        for client in mine.federation.clients:
            assert torch.equal(mine.client_states[client].public["input"], generated["input"])


@pytest.mark.parametrize(
    ("on_generated", "plain"),
    [(FTKDOnGeneratedImages, FTKD), (EWCKDOnGeneratedImages, EWCKD), (LwFKDOnGeneratedImages, LwFKD)],
)
def test_with_a_public_set_of_these_images_it_is_the_method_itself(on_generated: Any, plain: Any) -> None:
    stream = tiny.stream((2, 1), absent=0)
    mine = tiny.simulation_with_tasks(on_generated(**SMALL), stream, rounds=2, cohort_size=5)
    theirs = tiny.simulation_with_tasks(plain(), stream, rounds=2, cohort_size=5)
    for _ in range(2):
        tiny.run_rounds(mine, 2)
        theirs.server.data, theirs.server.state.receivers = mine.server.state.generated, []
        tiny.run_rounds(theirs, 2)
        assert tiny.equal(mine.server.model, theirs.server.model)
        for client in mine.federation.clients:
            assert tiny.equal(mine.client_states[client].model, theirs.client_states[client].model)


def test_images_are_sent_once_a_task_and_weights_never() -> None:
    simulation = tiny.simulation_with_tasks(
        FTKDOnGeneratedImages(**SMALL), tiny.stream((2, 1), absent=0), rounds=2, cohort_size=5
    )
    records = tiny.run_rounds(simulation)
    for task, (new, seen) in enumerate(((2, 2), (1, 3))):
        searched, found = 2 * new * 16 * 4, 2 * (new * 16 * 4 + new * 8 + 3)
        logits, images = 3 * new * seen * 4, 3 * new * (16 + 8 + 1)
        first, second = records[2 * task : 2 * task + 2]
        assert (first["down"], first["up"]) == (5 * (searched + images + logits), 5 * (found + logits))
        assert (second["down"], second["up"]) == (5 * logits, 5 * logits)


def test_it_needs_a_generator_and_no_public_set(tmp_path: Any) -> None:
    recipe = tiny.write_recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"LwF\+KD on generated images needs a generator of images"):
        load_recipe(recipe, methods=["lwf-kd-on-generated-images"])
    load_recipe(recipe, methods=["lwf-kd-on-generated-images"], settings=["generator.name=somewhere"])
