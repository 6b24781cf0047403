"""Look at a generator's images, and measure their quality class by class.

python tools/generator_quality.py sample generators/grey-paper
python tools/generator_quality.py check generators/grey-disjoint --on grey --set prototypes.steps=500
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fedkeep._utils import progress, seeds
from fedkeep._utils.files import atomic_write
from fedkeep.cli.main import DATA, QUIET, add_arguments, natural, positive
from fedkeep.cli.text import Terminal, say, say_error
from fedkeep.data import Augmentation, Data, DataOptions, DataSet
from fedkeep.display import Display
from fedkeep.errors import ConfigError, FedKeepError, MissingExtra, RunError
from fedkeep.experiment.build import check_device
from fedkeep.experiment.recipe_loader import read_settings
from fedkeep.generation.generator import REGIMES, Sampler
from fedkeep.generation.pixel import PixelGenerator, load_generator
from fedkeep.generation.prototypes import PrototypeSearch, cached_images, check_held, search_prototypes
from fedkeep.generation.training import load_benchmark, load_training_data
from fedkeep.interface import Training
from fedkeep.losses import CrossEntropy
from fedkeep.models import Architecture, get_architecture
from fedkeep.options import as_table
from fedkeep.reporting.figures import INK, PAPER, save_figure, theme
from fedkeep.training.local_training import BatchStream, Normalise, TrainJob, fit
from fedkeep.training.model_runner import ModelRunner

CLASSIFIER_TRAINING = Training(batch_size=64, lr=0.02, momentum=0.9)
CLASSIFIER_STEPS = 2000  # of every classifier of the quality check, whatever its number of images
Classifier = Callable[[Tensor], Tensor]
"""Maps uint8 images [n, channels, height, width] to logits [n, classes]."""

TrainClassifier = Callable[[Data], Classifier]
"""Trains a classifier on labelled images, always in the same way."""


@dataclass(frozen=True, eq=False)
class QualityReport:
    """Accuracies of two classifiers by class, each float64 [classes]; NaN for a class without images.

    ``real``: Trained on real images, tested on real images: the reference.
    ``shown``: The same classifier, tested on generated images: do they show their classes?
    ``learned``: Trained on generated images, tested on real images: can one learn from them?
    """

    real: Tensor
    shown: Tensor
    learned: Tensor


def quality_check(
    train_classifier: TrainClassifier, train: Data, test: Data, generated: Data, num_classes: int
) -> QualityReport:
    """Return how good generated images are.

    ``train``: Real training images: ``"input"``, uint8 [n, channels, height, width], and ``"label"``, int64 [n].
    """
    reference = train_classifier(train)
    real, shown = (class_accuracies(reference, data, num_classes) for data in (test, generated))
    return QualityReport(real, shown, class_accuracies(train_classifier(generated), test, num_classes))


def class_accuracies(classifier: Classifier, data: Data, num_classes: int) -> Tensor:
    """Return the share of each class's images that are classified correctly, float64 [num_classes]."""
    labels = data["label"].cpu()
    correct = classifier(data["input"]).argmax(1).cpu() == labels
    total = torch.bincount(labels, minlength=num_classes).double()
    return torch.bincount(labels[correct], minlength=num_classes).double() / total


def train_classifier(
    architecture: Architecture,
    data: Data,
    classes: int,
    normalise: Normalise,
    training: Training,
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Callable[[Tensor], Tensor]:
    """Train a classifier.

    ``data``: The columns ``"input"``, uint8 [n, channels, height, width], and ``"label"``, int64 [n].
    ``normalise``: Maps uint8 images to the network's input.
    ``training``: The settings of SGD, except for the number of epochs.
    ``steps``: Smallest number of optimizer steps; the last epoch is completed.
    Returns: A function that maps uint8 images, [n, channels, height, width], to logits, [n, classes].
    """
    _, channels, height, width = data["input"].shape
    runner = ModelRunner(lambda: architecture.build((channels, height, width), classes), seed, torch.device(device))
    normalised = {"input": normalise(data["input"].to(device)), "label": data["label"].to(device)}
    order, noise = (seeds.rng(seed, purpose) for purpose in ("batches", "augmentation"))
    stream = BatchStream(normalised, normalise, Augmentation(), order, noise, runner.layout)
    epochs = math.ceil(steps / math.ceil(len(data["label"]) / training.batch_size))
    noise_seed = seeds.derive(seed, "network noise")
    trained = fit(runner, TrainJob(runner.initial, CrossEntropy(), [stream], epochs, 1, noise_seed), training)
    return lambda images: runner.logits(trained.model, normalise(images.to(device)))


_GAP = 2  # pixels between images
_ZOOM = 1.5  # points a pixel
FONT_SIZE = 10.0


def image_grid(real: Sequence[Tensor], generated: Sequence[Tensor], label_names: Sequence[str], title: str) -> Figure:
    """Draw a row a class: real images left, generated ones right.

    ``real``, ``generated``: For each class, uint8 [count, channels, height, width]; counts may differ, even be 0.
    """
    sides = [_canvas(images) for images in (real, generated)]
    height = sides[0].shape[0]
    aisle = np.full((height, 6 * _GAP, 3), 255, dtype=np.uint8)
    canvas = np.concatenate((sides[0], aisle, sides[1]), axis=1)
    row = height / len(label_names)
    margin_left, margin_top = 0.65 * FONT_SIZE * max(map(len, label_names)) + 12, 4 * FONT_SIZE
    wide, high = canvas.shape[1] * _ZOOM, height * _ZOOM
    width_points, height_points = wide + margin_left + 8, high + margin_top + 8
    with theme():
        figure = Figure(figsize=(width_points / 72, height_points / 72), facecolor=PAPER)
        axes = figure.add_axes(
            (margin_left / width_points, 8 / height_points, wide / width_points, high / height_points)
        )
        axes.imshow(canvas, interpolation="nearest", aspect="auto", extent=(0, canvas.shape[1], height, 0))
        axes.set_yticks([row * (number + 0.5) for number in range(len(label_names))])
        axes.set_yticklabels([name.replace("$", r"\$") for name in label_names], color=INK)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for text, place in (("real", 0), ("generated", sides[0].shape[1] + aisle.shape[1])):
            axes.text(place, -_GAP, text, va="bottom", color=INK)
        figure.text(0.01, 1 - 0.4 * FONT_SIZE / height_points, title, va="top", color=INK)
    return figure


def _canvas(classes: Sequence[Tensor]) -> NDArray[np.uint8]:
    """Return rows of images as one picture [height, width, 3], white where there is none."""
    _, channels, height, width = classes[0].shape
    columns = max(1, *(len(images) for images in classes))
    canvas = np.full((len(classes) * (height + _GAP), columns * (width + _GAP), 3), 255, dtype=np.uint8)
    for row, images in enumerate(classes):
        for column, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            top, left = row * (height + _GAP), column * (width + _GAP)
            canvas[top : top + height, left : left + width] = image if channels == 3 else image.repeat(3, axis=2)
    return canvas


def sample(options: argparse.Namespace, console: Console) -> int:
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


def check(options: argparse.Namespace, console: Console) -> int:
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
        total = len(self.prototypes) * math.ceil(count / per_class)
        with (
            Display(console, {}, unit="image", quiet=self.quiet) as display,
            progress.subscribe(lambda _, part: display.count(round(part * total), total), every=0.0),
        ):
            return cached_images(
                self.generator,
                self.prototypes,
                [c for c in range(self.dataset.num_classes) for _ in range(per_class)],
                math.ceil(count / per_class),
                self.sampler,
                seed=self.seed,
            )


def _prepare(options: argparse.Namespace, console: Console) -> _Request:
    if find_spec("diffusers") is None:
        raise MissingExtra("this tool", "diffusion")
    sections = {"sampler": Sampler, "prototypes": PrototypeSearch, "data": DataOptions}
    given = read_settings(["prototypes.steps=250", *options.settings], sections)
    where = options.data_dir, cast(DataOptions, given["data"])
    generator = load_generator(options.folder, check_device(options.device))
    card = generator.card
    say(console, f"regime {card.regime}: {REGIMES[card.regime]}")
    sampler, prototypes = cast(Sampler, given["sampler"]), generator.class_embeddings()
    if options.on is None:
        name, dataset = card.data, load_training_data(card.data, card.regime, *where).dataset
        if dataset.label_names != card.label_names:
            raise RunError(f"the generator in {options.folder} learned other classes than {name} has on this machine.")
    else:
        name, dataset = options.on, load_benchmark(options.on, *where)
        examples = dataset.train
        if (name, "same_classes") == (card.data, card.regime):
            examples = load_training_data(name, card.regime, *where).unseen
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
    found, losses = search_prototypes(generator, initial, images["input"], images["label"], settings, rng)
    first, last = (sum(part) / len(part) for part in (losses[:20], losses[-20:]))
    say(console, f"prototypes: {settings.steps} steps, loss {first:.4f} at first, {last:.4f} at last")
    return found


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    drawn = verbs.add_parser("sample", help="write a picture of real and generated images side by side")
    drawn.add_argument("--out", metavar="FILE", help="the picture, .png (default: samples.png in the folder)")
    drawn.add_argument("--count", type=positive, default=8, help="images of each class (default: 8)")
    drawn.set_defaults(command=sample)
    checked = verbs.add_parser("check", help="measure with classifiers how good a generator is, class by class")
    checked.add_argument("--count", type=positive, default=200, help="generated images of each class (default: 200)")
    checked.add_argument("--real", type=positive, default=1000, help="real images of each class, at most")
    checked.add_argument("--model", default="cnn4", help="architecture of the classifiers (default: cnn4)")
    checked.set_defaults(command=check)
    for verb in (drawn, checked):
        verb.add_argument("folder", metavar="DIR", help="folder of the generator")
        verb.add_argument("--on", metavar="DATA", help="generate the classes of this data set, after a search")
        verb.add_argument("--set", action="append", default=[], metavar="SECTION.OPTION=VALUE", dest="settings")
        verb.add_argument("--seed", type=natural, default=0)
        verb.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
        add_arguments(verb, [*DATA, QUIET])
    options = parser.parse_args(arguments)
    try:
        return int(options.command(options, Terminal()))
    except FedKeepError as error:
        say_error(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
