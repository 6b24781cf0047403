"""``fedkeep pretrain``: train an extractor with labels, for a server that then only learns a classifier."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from rich.console import Console

from fedkeep.cli.progress import Counter
from fedkeep.cli.text import say
from fedkeep.data import Augmentation, load
from fedkeep.errors import ConfigError, MissingExtra, did_you_mean
from fedkeep.experiment.build import check_device
from fedkeep.experiment.overrides import read_settings
from fedkeep.training.pretraining import FORMS, Form, Pretraining, pretrain


def run(options: Namespace, console: Console) -> int:
    """Train an extractor, or continue its training."""
    if find_spec("transformers") is None:
        raise MissingExtra("fedkeep pretrain", "diffusion")
    if options.network not in FORMS:
        raise ConfigError(f"there is no network {options.network!r} here.{did_you_mean(options.network, FORMS)}")
    device = check_device(options.device)
    sections = {"network": FORMS[options.network], "training": Pretraining, "augmentation": Augmentation}
    given = read_settings(options.settings, sections, {"augmentation": {"crop_padding": 4, "horizontal_flip": True}})
    settings = cast(Pretraining, given["training"])
    dataset = load(options.data, data_dir=options.data_dir)
    say(console, f"{dataset.name}: {len(dataset.train['label']):,} images of {dataset.num_classes} classes")
    with Counter(console, "steps", options.quiet) as counter:
        extractor = pretrain(
            cast(Form, given["network"]),
            dataset,
            settings,
            cast(Augmentation, given["augmentation"]),
            Path(options.out),
            seed=options.seed,
            device=device,
            on_step=lambda done, loss: counter(done, settings.steps, f"loss {loss:.4f}"),
        )
    say(console, extractor.about)
    say(console, f"wrote {options.out}; use it: --set model.name=pretrained --set model.source={options.out}")
    return 0
