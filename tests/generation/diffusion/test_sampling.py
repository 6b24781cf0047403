"""Drawing images, and keeping them on disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import Tensor

from fedkeep._utils import progress
from fedkeep.errors import ConfigError, RunError, ValueRefused
from fedkeep.generation.generator import NoiseSchedule, Sampler
from fedkeep.generation.pixel import PixelGenerator
from fedkeep.generation.prototypes import MAX_BYTES, cached_images, sample

SAMPLER = Sampler(steps=4)
METHODS = ("ddim", "dpm-solver++", "ddpm")


class Known(PixelGenerator):
    """Knows the one image that there is, so that its prediction is exact: every sampler must find that image."""

    def predict_noise(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        kept = (
            1
            - torch.linspace(
                self.noise_schedule.beta_start, self.noise_schedule.beta_end, self.noise_schedule.num_timesteps
            )
        ).cumprod(0)[timesteps]
        kept = kept.view(-1, 1, 1, 1)
        return (noisy - kept.sqrt() * self.image) / (1 - kept).sqrt()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_every_sampler_finds_the_image_of_an_exact_model(method: Any, guidance: float) -> None:
    plain = toy.generator()
    result = Known(plain.card, plain.network.state_dict())
    picture = toy.data(3)["input"][2:]
    result.image = result.encode(picture, torch.Generator())  # type: ignore[attr-defined]
    generated_images = sample(
        result, result.class_embeddings(), [0, 1], [5, 6], Sampler(method=method, steps=20, guidance=guidance)
    )
    assert generated_images.dtype == torch.uint8
    assert (generated_images.int() - picture.int()).abs().max() <= 4


@pytest.mark.parametrize("method", METHODS)
def test_an_image_depends_on_its_seed_and_prototype_alone(method: Any) -> None:
    result, sampler = toy.generator(), Sampler(method=method, steps=4)
    rows, image_seeds = [0, 1, 2, 0, 1], [11, 12, 13, 14, 11]
    whole = sample(result, result.class_embeddings(), rows, image_seeds, sampler)
    assert whole.shape == (5, 1, 8, 8)
    output: list[int] = []
    for size in (1, 2, 3):
        again = sample(
            result, result.class_embeddings(), rows, image_seeds, sampler, batch_size=size, on_images=output.append
        )
        assert (again.int() - whole.int()).abs().max() <= 1  # other batches round differently
    assert output[-2:] == [3, 5]
    assert not torch.equal(whole[0], whole[3])
    assert not torch.equal(whole[0], whole[4])
    assert torch.equal(sample(result, result.class_embeddings(), rows, image_seeds, sampler), whole)


def test_guidance_by_the_formula() -> None:
    result = toy.generator()
    asked: list[int] = []
    predict = result.predict_noise

    def watched(noisy: Tensor, times: Tensor, output: Tensor) -> Tensor:
        asked.append(len(noisy))
        return predict(noisy, times, output)

    result.predict_noise = watched  # type: ignore[method-assign]
    one, none, two = (
        sample(result, result.class_embeddings(), [0], [1], Sampler(steps=3, guidance=g)) for g in (1.0, 0.0, 4.0)
    )
    assert asked == [1] * 3 + [2] * 6
    null = result.null_conditioning().detach()
    assert torch.equal(none, sample(result, null, [0], [1], Sampler(steps=3, guidance=1.0)))
    assert not torch.equal(one, two)


def test_latents_are_not_clipped() -> None:
    for method in METHODS[:2]:
        scheduler = Sampler(method=method, steps=5).scheduler(NoiseSchedule(clip_sample=False))  # type: ignore[arg-type]
        assert not scheduler.config.get("clip_sample")
        assert not scheduler.config.get("thresholding")
    times = Sampler(steps=50).scheduler(NoiseSchedule(clip_sample=False)).timesteps
    assert times[-1] == 1  # shifted by one


def test_more_steps_than_times_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sampler.steps is 50, but the generator knows 20 times"):
        sample(toy.generator(), torch.zeros(1, 3), [0], [0], Sampler())


# --- the cache -----------------------------------------------------------------------------------------------------


def stored(folder: Path, generator: PixelGenerator | None = None, **changes: Any) -> Any:
    result = generator or toy.generator()
    given = {
        "prototypes": result.class_embeddings(),
        "labels": [4, 7, 2],
        "count": 2,
        "sampler": SAMPLER,
        "seed": 0,
    } | changes
    with pytest.MonkeyPatch.context() as context:
        context.setenv("FEDKEEP_CACHE", str(folder))
        context.setattr("fedkeep.generation.prototypes.MAX_BYTES", given.pop("most", MAX_BYTES))
        return cached_images(result, **given)


class Sampled:
    """Counts what is drawn anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images = 0

        def counted(generator: Any, prototypes: Any, rows: Any, *rest: Any, **named: Any) -> Tensor:
            self.images += len(rows)
            return sample(generator, prototypes, rows, *rest, **named)

        monkeypatch.setattr("fedkeep.generation.prototypes.sample", counted)

    def since(self) -> int:
        count, self.images = self.images, 0
        return count


def test_nothing_is_drawn_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, heard = Sampled(monkeypatch), []
    with progress.subscribe(lambda word, _: heard.append(word), every=0.0):
        first = stored(tmp_path)
        assert heard[-1] == "images generated 6/6"
    assert first["label"].tolist() == [4, 4, 7, 7, 2, 2]
    assert first["input"].shape == (6, 1, 8, 8)
    assert sampled.since() == 6
    with progress.subscribe(lambda word, _: heard.append(word), every=0.0):
        again = stored(tmp_path)
    assert torch.equal(again["input"], first["input"])
    assert sampled.since() == 0
    assert heard[-1] == "images generated 6/6"
    rows = toy.generator().class_embeddings()
    rows[1] += 0.1
    for changes, fresh in (
        ({"prototypes": rows}, 2),
        ({"generator": toy.generator(seed=1)}, 6),
        ({"sampler": Sampler(steps=5)}, 6),
        ({"labels": [4, 8, 2]}, 2),
        ({"count": 3}, 9),
        ({"seed": 1}, 6),
    ):
        stored(tmp_path, **changes)
        assert sampled.since() == fresh, changes
    more = stored(tmp_path, count=3)["input"].view(3, 3, 1, 8, 8)[:, :2].flatten(0, 1)
    assert (more.int() - first["input"].int()).abs().max() <= 1  # the first of a class are the same


def test_a_damaged_entry_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, first = Sampled(monkeypatch), stored(tmp_path)
    sampled.since()
    entries = sorted((tmp_path / "generated").iterdir())
    entries[0].write_bytes(entries[0].read_bytes()[:-7])
    entries[1].write_bytes(b"")
    assert torch.equal(stored(tmp_path)["input"], first["input"])
    assert sampled.since() == 4


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"cannot be kept in .*No space left on device.*FEDKEEP_CACHE"):
            stored(tmp_path)
    assert list((tmp_path / "generated").iterdir()) == []
    assert len(stored(tmp_path)["input"]) == 6


def test_what_was_used_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, folder = Sampled(monkeypatch), tmp_path / "generated"
    folder.mkdir()
    for age, label in ((30, 1), (20, 2), (10, 3)):  # seconds ago
        before = set(folder.iterdir())
        stored(tmp_path, prototypes=toy.generator().class_embeddings()[:1], labels=[label])
        (written,) = set(folder.iterdir()) - before
        os.utime(written, (time.time() - age,) * 2)
    (folder / ".half.tmp").write_bytes(b"left by a kill")
    os.utime(folder / ".half.tmp", (0, 0))
    (folder / "of somebody else").touch()
    stored(tmp_path, prototypes=toy.generator().class_embeddings()[:1], labels=[1])  # used again
    room = 3.5 * written.stat().st_size
    sampled.since()
    stored(tmp_path, prototypes=toy.generator().class_embeddings()[:1], labels=[4], most=room)
    assert sampled.since() == 2
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert not (folder / ".half.tmp").exists()
    assert (folder / "of somebody else").exists()
    for label, fresh in ((1, 0), (3, 0), (4, 0), (2, 2)):
        stored(tmp_path, prototypes=toy.generator().class_embeddings()[:1], labels=[label])
        assert sampled.since() == fresh, label


def test_images_of_another_device_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds differently: what a run generates must not depend on which device filled the cache."""
    first = stored(tmp_path)
    elsewhere = toy.generator()
    elsewhere.device = torch.device("meta")
    drawn = torch.zeros(2, *elsewhere.shape, dtype=torch.uint8)
    monkeypatch.setattr("fedkeep.generation.prototypes.sample", lambda *_, **__: drawn)
    assert not stored(tmp_path, elsewhere)["input"].any()
    assert torch.equal(stored(tmp_path)["input"], first["input"])


def test_a_prototype_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueRefused, match="these prototypes are of size"):
        stored(tmp_path, prototypes=torch.zeros(3, 1, 5))
