"""``fedkeep generator``: train a diffusion model, show its images, and measure their quality."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep._utils.files import atomic_write
from fedkeep.cli.progress import Counter
from fedkeep.cli.text import say
from fedkeep.data import Data, DataSet
from fedkeep.errors import ConfigError, MissingExtra, RunError, did_you_mean
from fedkeep.experiment.build import check_device
from fedkeep.experiment.overrides import read_settings
from fedkeep.generation.diffusion.generator import REGIMES, Regime
from fedkeep.generation.diffusion.image_cache import ImageCache
from fedkeep.generation.diffusion.pixel import ModelCard, PixelGenerator, load_generator
from fedkeep.generation.diffusion.prototypes import PrototypeSearch, check_held, search_prototypes
from fedkeep.generation.diffusion.quality_check import QualityReport, quality_check
from fedkeep.generation.diffusion.schedules import NoiseSchedule, Sampler
from fedkeep.generation.diffusion.subclass_clusters import cluster_subclasses
from fedkeep.generation.diffusion.training import GeneratorTraining, train_generator
from fedkeep.generation.diffusion.training_data import load_benchmark, load_training_data
from fedkeep.generation.diffusion.unet import UNet
from fedkeep.interface import Training
from fedkeep.models import get_architecture
from fedkeep.options import as_table
from fedkeep.reporting.figures import image_grid, save_figure
from fedkeep.training.classifier import train_classifier

CLASSIFIER_TRAINING = Training(batch_size=64, lr=0.02, momentum=0.9)
CLASSIFIER_STEPS = 2000  # of every classifier of the quality check, whatever its number of images


def train(options: Namespace, console: Console) -> int:
    """Train a generator, or continue its training."""
    _require_diffusers()
    if options.regime not in get_args(Regime):
        raise ConfigError(
            f"there is no regime {options.regime!r}.{did_you_mean(options.regime, map(str, get_args(Regime)))}"
        )
    device = check_device(options.device)
    given = read_settings(
        options.settings, {"unet": UNet, "noise_schedule": NoiseSchedule, "training": GeneratorTraining}
    )
    settings = cast(GeneratorTraining, given["training"])
    source = load_training_data(options.data, options.regime, options.data_dir)
    dataset, data = source.dataset, source.seen
    if options.clusters > 1:
        subclasses = cluster_subclasses(data["input"], data["label"], options.clusters, options.seed)
        data = {**data, "subclass": subclasses}
    card = ModelCard(
        cast(UNet, given["unet"]),
        cast(NoiseSchedule, given["noise_schedule"]),
        dataset.shape,
        dataset.label_names,
        source.name,
        source.regime,
        held_out=source.held_out,
        clusters_per_class=options.clusters,
    )
    per_class = f", {options.clusters} clusters each" if options.clusters > 1 else ""
    say(console, f"{dataset.name}: {int(source.is_seen.sum()):,} images of {dataset.num_classes} classes{per_class}")
    _print_regime(console, source.regime)
    with Counter(console, "steps", options.quiet) as counter:
        generator = train_generator(
            card,
            data,
            settings,
            Path(options.out),
            seed=options.seed,
            device=device,
            half=options.half,
            on_step=lambda done, loss: counter(done, settings.steps, f"loss {loss:.4f}"),
        )
    say(console, f"{generator.num_parameters:,} parameters, loss {generator.card.training['loss']:.4f}")
    say(console, f"wrote {options.out}; see its images: fedkeep generator sample {options.out}")
    return 0


def sample(options: Namespace, console: Console) -> int:
    """Write a picture of real and generated images."""
    out = Path(options.out or Path(options.folder) / "samples.png")
    if out.suffix != ".png":
        raise ConfigError(f"--out {out}: the picture is written as .png.")
    request = _prepare(options, console)
    generated = request.generate(options.count, console)
    train, names = request.dataset.train, request.dataset.label_names
    real = [train["input"][_first_of_class(train["label"], c, options.count)] for c in range(len(names))]
    title = f"{request.generator.card.data}, {request.generator.regime}: {_describe(request.sampler)}"
    figure = image_grid(real, generated["input"].chunk(len(names)), names, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, out, dpi=96)
    say(console, f"wrote {out}")
    return 0


def check(options: Namespace, console: Console) -> int:
    """Run the quality check; print its accuracies and write them into the generator's folder."""
    model = get_architecture(options.model)()
    request = _prepare(options, console)
    generated = request.generate(options.count, console)
    dataset = request.dataset
    chosen = torch.cat([_first_of_class(dataset.train["label"], c, options.real) for c in range(dataset.num_classes)])
    real = {name: dataset.train[name][chosen] for name in ("input", "label")}

    def fit_classifier(data: Data) -> Any:
        return train_classifier(
            model,
            data,
            dataset.num_classes,
            dataset.normalise,
            CLASSIFIER_TRAINING,
            steps=CLASSIFIER_STEPS,
            seed=options.seed,
            device=request.generator.device,
        )

    report = quality_check(fit_classifier, real, dataset.test, generated, dataset.num_classes)
    console.print(_quality_table(report, dataset.label_names))
    accuracies = {
        "generator": request.generator.loaded_hash,
        "regime": request.generator.regime,
        "data": request.name,
        "prototypes": "found" if options.on else "learned",
        "sampler": as_table(request.sampler),
        "count": options.count,
        "model": options.model,
        "label_names": dataset.label_names,
        **{name: _to_json(values) for name, values in vars(report).items()},
    }
    out = Path(options.folder) / (
        "quality.json" if not options.on else f"quality-on-{request.name.replace('/', '-')}.json"
    )
    atomic_write(out, json.dumps(accuracies, indent=1) + "\n")
    say(console, f"wrote {out}")
    return 0


@dataclass(frozen=True)
class _Request:
    """A generator, the prototypes to generate from, and the real images; a class may have several prototypes."""

    name: str
    generator: PixelGenerator
    prototypes: Tensor
    dataset: DataSet
    sampler: Sampler
    seed: int
    quiet: bool

    def generate(self, count: int, console: Console) -> Data:
        """Return at least ``count`` images of each class, equally many from each of its prototypes."""
        per_class = len(self.prototypes) // self.dataset.num_classes
        with Counter(console, "images", self.quiet) as counter:
            return ImageCache().images(
                self.generator,
                self.prototypes,
                [c for c in range(self.dataset.num_classes) for _ in range(per_class)],
                math.ceil(count / per_class),
                self.sampler,
                seed=self.seed,
                on_images=counter,
            )


def _prepare(options: Namespace, console: Console) -> _Request:
    _require_diffusers()
    given = read_settings(
        options.settings, {"sampler": Sampler, "prototypes": PrototypeSearch}, {"prototypes": {"steps": 250}}
    )
    generator = load_generator(options.folder, check_device(options.device))
    card = generator.card
    _print_regime(console, card.regime)
    sampler, prototypes = cast(Sampler, given["sampler"]), generator.class_embeddings()
    if options.on is None:
        name, dataset = card.data, load_training_data(card.data, card.regime, options.data_dir).dataset
        if dataset.label_names != card.label_names:
            raise RunError(f"the generator in {options.folder} learned other classes than {name} has on this machine.")
    else:
        name, dataset = options.on, load_benchmark(options.on, options.data_dir)
        examples = dataset.train
        if (name, "same_classes") == (card.data, card.regime):
            examples = load_training_data(name, card.regime, options.data_dir).unseen
        search = cast(PrototypeSearch, given["prototypes"])
        prototypes = _search_prototypes(generator, examples, dataset, search, options.seed, console)
    return _Request(name, generator, prototypes, dataset, sampler, options.seed, options.quiet)


def _search_prototypes(
    generator: PixelGenerator, images: Data, dataset: DataSet, settings: PrototypeSearch, seed: int, console: Console
) -> Tensor:
    """Return the prototypes that one client with all images would find."""
    check_held(torch.bincount(images["label"], minlength=dataset.num_classes), dataset.label_names)
    rng = seeds.rng(seed, "prototypes")
    initial = generator.initial_prototypes(dataset.num_classes)
    result = search_prototypes(generator, initial, images["input"], images["label"], settings, rng)
    first, last = (sum(part) / len(part) for part in (result.losses[:20], result.losses[-20:]))
    say(console, f"prototypes: {settings.steps} steps, loss {first:.4f} at first, {last:.4f} at last")
    return result.prototypes


def _quality_table(report: QualityReport, label_names: Sequence[str]) -> Table:
    table = Table(
        "class", "real to real", "real to generated", "generated to real", box=box.SIMPLE_HEAD, pad_edge=False,
        title="accuracy in %: trained on, to tested on", title_justify="left",
    )  # fmt: skip
    columns = (report.real, report.shown, report.learned)
    for c, name in enumerate(label_names):
        table.add_row(escape(name), *(f"{100 * float(column[c]):.1f}" for column in columns))
    sources = dict.fromkeys(name.partition(": ")[0] for name in label_names if ": " in name)
    groups = {source: [c for c, name in enumerate(label_names) if name.startswith(f"{source}: ")] for source in sources}
    table.add_section()
    for name, members in (groups | {"all classes": list(range(len(label_names)))}).items():
        table.add_row(escape(name), *(f"{100 * float(column[members].mean()):.1f}" for column in columns))
    return table


def _to_json(values: Tensor) -> list[float | None]:
    """Return accuracies for JSON; None for a class without an image."""
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


def _first_of_class(labels: Tensor, c: int, count: int) -> Tensor:
    return (labels == c).nonzero().flatten()[:count]


def _describe(sampler: Sampler) -> str:
    return f"{sampler.method}, {sampler.steps} steps, guidance {sampler.guidance:g}"


def _print_regime(console: Console, regime: Regime) -> None:
    say(console, f"regime {regime}: {REGIMES[regime]}")


def _require_diffusers() -> None:
    if find_spec("diffusers") is None:
        raise MissingExtra("fedkeep generator", "diffusion")
