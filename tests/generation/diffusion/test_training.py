"""Training a generator: it learns, is resumed to the bit, and says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from fedkeep.errors import DataError, RunError
from fedkeep.generation.pixel import read_fingerprints
from fedkeep.generation.training import GeneratorTraining, _Batches, train_generator


def train(folder: Path, settings: GeneratorTraining = toy.TRAINING, **changes: Any) -> Any:
    given: dict[str, Any] = {"card": toy.card(), "data": toy.data(), "settings": settings} | changes
    return train_generator(folder=folder, **given)


def test_it_learns_and_keeps_the_average(trained_toy: Any) -> None:
    losses, found = trained_toy.losses, trained_toy.load()
    assert len(losses) == 100
    assert sum(losses[50:60]) < 0.8 * sum(losses[:10])
    assert found.card.training["steps"] == 100
    assert found.card.training["images"] == 90
    assert sorted(path.name for path in trained_toy.folder.iterdir()) == ["generator.json", "weights.safetensors"]
    assert found.hash() == trained_toy.hash


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("whole"))


def test_a_training_that_is_stopped_loses_no_step(whole: Any, tmp_path: Path) -> None:
    settings, steps = replace(toy.TRAINING, checkpoint=1e9), list[int]()

    def stop(done: int, loss: float) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", settings, on_step=stop)
    resumed = train(tmp_path / "stopped", settings, on_step=lambda done, loss: steps.append(done))
    assert steps == [5, 6]
    assert resumed.hash() == whole.hash()


@pytest.mark.parametrize(
    ("killed_at", "saved_at"),
    [(5, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (6, 6), (4, 0)))],
)
def test_a_killed_training_ends_in_the_same_bits(killed_at: int, saved_at: int, whole: Any, tmp_path: Path) -> None:
    checkpoint, saved = tmp_path / "killed" / "checkpoint.safetensors", b""

    def kill(done: int, loss: float) -> None:
        nonlocal saved
        if done == saved_at:
            saved = checkpoint.read_bytes()
        if done == killed_at:
            raise KeyboardInterrupt

    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", on_step=kill)
    if saved:
        checkpoint.write_bytes(saved)
    else:
        checkpoint.unlink()
    resumed = train(tmp_path / "killed", on_step=lambda done, loss: steps.append(done))
    assert resumed.hash() == whole.hash()
    assert steps[:1] == list(range(saved_at + 1, 7))[:1]  # from the last checkpoint on
    assert resumed.card == whole.card


def test_the_seed_decides_and_no_global_generator_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, state = train(tmp_path / "a"), torch.get_rng_state()
    torch.manual_seed(2)
    assert train(tmp_path / "b").hash() == first.hash() != train(tmp_path / "c", seed=1).hash()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_classes_are_drawn_evenly_and_some_not_told() -> None:
    data = toy.data(30)
    few = {name: column[(data["label"] > 0) | (torch.arange(30) < 3)] for name, column in data.items()}
    assert torch.bincount(few["label"]).tolist() == [1, 10, 10]
    draws = _Batches(few, toy.card(), replace(toy.TRAINING, batch_size=4000, null=0.25), 0)
    images, classes, times, noise = draws(0)
    share = torch.bincount(classes, minlength=4) / 4000
    assert torch.allclose(share, torch.full((4,), 0.25), atol=0.03)
    assert (int(times.min()), int(times.max())) == (0, 19)
    bright = images.mean(3).unfold(2, 2, 2).mean(3)[:, 0]
    text = classes < 3
    assert ((bright.argmax(1) * 2 // 3 - classes).abs()[text] <= 1).all()
    assert noise.shape == images.shape
    assert not torch.equal(draws(1)[3], noise)


def test_another_training_is_not_continued(tmp_path: Path) -> None:
    def kill(done: int, loss: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, on_step=kill)
    for changes, what in (
        ({"seed": 1}, "another 'seed'"),
        ({"data": toy.data(33)}, "another 'data'"),
        ({"settings": replace(toy.TRAINING, lr=1e-4)}, "another 'training'"),
    ):
        with pytest.raises(RunError, match=f"belongs to another training: it has {what}"):
            train(tmp_path, **changes)
    checkpoint, content = tmp_path / "checkpoint.safetensors", (tmp_path / "checkpoint.safetensors").read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 0x40
    checkpoint.write_bytes(flipped)
    with pytest.raises(RunError, match=r"cannot read the checkpoint .*its numbers are not those that were written"):
        train(tmp_path)
    checkpoint.write_bytes(content)
    train(tmp_path)
    checkpoint.write_bytes(content)  # as if it had been stopped before this was removed
    train(tmp_path)
    assert not checkpoint.exists()
    with pytest.raises(RunError, match="holds a generator already"):
        train(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "checkpoint.safetensors").write_bytes(b"half")
    with pytest.raises(RunError, match="cannot read the checkpoint"):
        train(tmp_path / "broken")


def test_a_finished_generator_keeps_its_fingerprints_beside_another_training(tmp_path: Path) -> None:
    card, data = replace(toy.card(), regime="same_classes"), toy.data()

    def keep(done: int, loss: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_generator(card, data, toy.TRAINING, tmp_path, on_step=keep)
    content = (tmp_path / "checkpoint.safetensors").read_bytes()
    train_generator(card, data, toy.TRAINING, tmp_path)
    (tmp_path / "checkpoint.safetensors").write_bytes(content)
    with pytest.raises(RunError, match="belongs to another training"):
        train_generator(card, {**data, "input": 255 - data["input"]}, toy.TRAINING, tmp_path)
    assert len(read_fingerprints(tmp_path)) == len(data["label"])


def test_data_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"these images are 1 x 28 x 28, and the generator shall draw 1 x 8 x 8"):
        train(tmp_path, data=toy.data(side=28))
    with pytest.raises(DataError, match="no images of 'c'"):
        train(tmp_path, data=toy.data(classes=2))


@pytest.mark.parametrize("steps", [6, 1])
def test_a_training_that_diverges_leaves_no_generator(tmp_path: Path, steps: int) -> None:
    # After one step the weights are spoiled, and the loss is still that of the initial ones.
    output = "the loss of step [2-6] is" if steps > 1 else "has numbers that are not finite"
    with pytest.raises(RunError, match=rf"diverged: .*{output}.*lower learning rate"):
        train(tmp_path, replace(toy.TRAINING, steps=steps, lr=1e38))
    assert not (tmp_path / "generator.json").exists()


def test_the_learning_rate_falls() -> None:
    settings = GeneratorTraining(steps=101, lr=1.0, lr_end=0.01)
    assert [round(settings.lr_in_step(step), 4) for step in (0, 50, 100)] == [1.0, 0.505, 0.01]
