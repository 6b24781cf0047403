"""``fedkeep generator``: train a diffusion model, look at what it draws, and measure how good that is."""

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

from fedkeep import seeds
from fedkeep.cli.progress import Counter
from fedkeep.cli.settings import read_settings
from fedkeep.data import Data, DataSet
from fedkeep.errors import ConfigError, MissingExtra, RunError, did_you_mean
from fedkeep.experiment.build import check_device
from fedkeep.files import write_whole
from fedkeep.interface import Training
from fedkeep.models import architecture
from fedkeep.options import as_table
from fedkeep.reporting.image_grid import image_grid
from fedkeep.reporting.plots import save_png
from fedkeep.synthesis.diffusion.codes import finer_codes
from fedkeep.synthesis.diffusion.gate import Gate, quality_gate
from fedkeep.synthesis.diffusion.generator import REGIMES, Regime
from fedkeep.synthesis.diffusion.material import benchmark, material
from fedkeep.synthesis.diffusion.noise import Noise, Sampler
from fedkeep.synthesis.diffusion.pixel import Card, PixelGenerator, load_generator
from fedkeep.synthesis.diffusion.prototypes import Inversion, check_held, invert
from fedkeep.synthesis.diffusion.store import ImageStore
from fedkeep.synthesis.diffusion.training import GeneratorTraining, train_generator
from fedkeep.synthesis.diffusion.unet import UNet
from fedkeep.training.classifier import train_classifier

JUDGE = Training(batch_size=64, lr=0.02, momentum=0.9)
JUDGE_STEPS = 2000  # as many for every classifier of the gate, however many images it has


def train(options: Namespace, console: Console) -> int:
    """Train a generator, or go on with its training."""
    _require_diffusers()
    if options.regime not in get_args(Regime):
        raise ConfigError(
            f"there is no regime {options.regime!r}.{did_you_mean(options.regime, map(str, get_args(Regime)))}"
        )
    device = check_device(options.device)
    given = read_settings(options.settings, {"unet": UNet, "noise": Noise, "training": GeneratorTraining})
    settings = cast(GeneratorTraining, given["training"])
    learned = material(options.data, options.regime, options.data_dir)
    dataset = learned.dataset
    data = learned.learned
    if options.codes > 1:
        data = {**data, "code": finer_codes(data["image"], data["label"], options.codes, options.seed)}
    card = Card(
        cast(UNet, given["unet"]),
        cast(Noise, given["noise"]),
        dataset.shape,
        dataset.label_names,
        learned.name,
        learned.regime,
        held_out=learned.held_out,
        codes=options.codes,
    )
    finer = f", {options.codes} codes each" if options.codes > 1 else ""
    _say(console, f"{dataset.name}: {int(learned.seen.sum()):,} images of {dataset.classes} classes{finer}")
    _say_regime(console, learned.regime)
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
    _say(console, f"{generator.parameters:,} parameters, loss {generator.card.training['loss']:.4f}")
    _say(console, f"wrote {options.out}; look at it: fedkeep generator sample {options.out}")
    return 0


def sample(options: Namespace, console: Console) -> int:
    """Draw a picture of real and generated images."""
    out = Path(options.out or Path(options.folder) / "samples.png")
    if out.suffix != ".png":
        raise ConfigError(f"--out {out}: the picture is written as .png.")
    work = _work(options, console)
    generated = work.draw(options.count, console)
    train, names = work.dataset.train, work.dataset.label_names
    real = [train["image"][_first(train["label"], c, options.count)] for c in range(len(names))]
    title = f"{work.generator.card.data}, {work.generator.regime}: {_about(work.sampler)}"
    figure = image_grid(real, generated["image"].chunk(len(names)), names, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, out, dpi=96)
    _say(console, f"wrote {out}")
    return 0


def check(options: Namespace, console: Console) -> int:
    """Apply the quality gate; print its figures and write them beside the generator."""
    model = architecture(options.model)()
    work = _work(options, console)
    generated = work.draw(options.count, console)
    dataset = work.dataset
    chosen = torch.cat([_first(dataset.train["label"], c, options.real) for c in range(dataset.classes)])
    real = {name: dataset.train[name][chosen] for name in ("image", "label")}

    def learn(data: Data) -> Any:
        return train_classifier(
            model, data, dataset.classes, dataset.normalise, JUDGE, steps=JUDGE_STEPS, seed=options.seed,
            device=work.generator.device,
        )  # fmt: skip

    gate = quality_gate(learn, real, dataset.test, generated, dataset.classes)
    console.print(_gate_table(gate, dataset.label_names))
    figures = {
        "generator": work.generator.loaded_hash,
        "regime": work.generator.regime,
        "data": work.name,
        "prototypes": "found" if options.on else "learned",
        "sampler": as_table(work.sampler),
        "count": options.count,
        "model": options.model,
        "label_names": dataset.label_names,
        **{name: _figures(values) for name, values in vars(gate).items()},
    }
    out = Path(options.folder) / ("gate.json" if not options.on else f"gate-on-{work.name.replace('/', '-')}.json")
    write_whole(out, json.dumps(figures, indent=1) + "\n")
    _say(console, f"wrote {out}")
    return 0


@dataclass(frozen=True)
class _Work:
    """A generator, what it shall draw, and the real images of that; of a class there may be several prototypes."""

    name: str
    generator: PixelGenerator
    prototypes: Tensor
    dataset: DataSet
    sampler: Sampler
    seed: int
    quiet: bool

    def draw(self, count: int, console: Console) -> Data:
        """Return so many images of each class, as many of each of its prototypes; a few more where that cannot be."""
        codes = len(self.prototypes) // self.dataset.classes
        with Counter(console, "images", self.quiet) as counter:
            return ImageStore().images(
                self.generator,
                self.prototypes,
                [c for c in range(self.dataset.classes) for _ in range(codes)],
                math.ceil(count / codes),
                self.sampler,
                seed=self.seed,
                on_images=counter,
            )


def _work(options: Namespace, console: Console) -> _Work:
    _require_diffusers()
    given = read_settings(
        options.settings, {"sampler": Sampler, "prototypes": Inversion}, {"prototypes": {"steps": 250}}
    )
    generator = load_generator(options.folder, check_device(options.device))
    card = generator.card
    _say_regime(console, card.regime)
    sampler, prototypes = cast(Sampler, given["sampler"]), generator.rows()
    if options.on is None:
        name, dataset = card.data, material(card.data, card.regime, options.data_dir).dataset
        if dataset.label_names != card.label_names:
            raise RunError(f"the generator in {options.folder} learned other classes than {name} has here.")
    else:
        name, dataset = options.on, benchmark(options.on, options.data_dir)
        private = dataset.train
        if (name, "same_classes") == (card.data, card.regime):
            private = material(name, card.regime, options.data_dir).left
        prototypes = _found(generator, private, dataset, cast(Inversion, given["prototypes"]), options.seed, console)
    return _Work(name, generator, prototypes, dataset, sampler, options.seed, options.quiet)


def _found(
    generator: PixelGenerator, images: Data, dataset: DataSet, settings: Inversion, seed: int, console: Console
) -> Tensor:
    """Return prototypes as one client with all images would find them."""
    check_held(torch.bincount(images["label"], minlength=dataset.classes), dataset.label_names)
    rng = seeds.generator(seed, "prototypes")
    found = invert(generator, generator.start(dataset.classes), images["image"], images["label"], settings, rng)
    first, last = (sum(part) / len(part) for part in (found.losses[:20], found.losses[-20:]))
    _say(console, f"prototypes: {settings.steps} steps, loss {first:.4f} at first, {last:.4f} at last")
    return found.prototypes


def _gate_table(gate: Gate, label_names: Sequence[str]) -> Table:
    table = Table(
        "class", "real to real", "real to generated", "generated to real", box=box.SIMPLE_HEAD, pad_edge=False,
        title="accuracy in %: trained on, to asked about", title_justify="left",
    )  # fmt: skip
    columns = (gate.real, gate.shown, gate.learned)
    for c, name in enumerate(label_names):
        table.add_row(escape(name), *(f"{100 * float(column[c]):.1f}" for column in columns))
    sources = dict.fromkeys(name.partition(": ")[0] for name in label_names if ": " in name)
    groups = {source: [c for c, name in enumerate(label_names) if name.startswith(f"{source}: ")] for source in sources}
    table.add_section()
    for name, members in (groups | {"all classes": list(range(len(label_names)))}).items():
        table.add_row(escape(name), *(f"{100 * float(column[members].mean()):.1f}" for column in columns))
    return table


def _figures(values: Tensor) -> list[float | None]:
    """Return accuracies as JSON can hold them; None for a class without an image."""
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


def _first(labels: Tensor, c: int, count: int) -> Tensor:
    return (labels == c).nonzero().flatten()[:count]


def _about(sampler: Sampler) -> str:
    return f"{sampler.method}, {sampler.steps} steps, guidance {sampler.guidance:g}"


def _say_regime(console: Console, regime: Regime) -> None:
    _say(console, f"regime {regime}: {REGIMES[regime]}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _require_diffusers() -> None:
    if find_spec("diffusers") is None:
        raise MissingExtra("fedkeep generator", "diffusion")
