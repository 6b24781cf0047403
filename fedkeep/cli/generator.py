"""``fedkeep generator``: train a diffusion model before a run uses it."""

from argparse import Namespace
from pathlib import Path
from typing import get_args

from rich.console import Console

from fedkeep._utils.process import Terminated
from fedkeep.cli.run import say_stopped
from fedkeep.cli.text import say
from fedkeep.data.schema import DataOptions
from fedkeep.display import Display
from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.experiment.build import check_device
from fedkeep.experiment.recipe_loader import read_settings
from fedkeep.generation.generator import REGIMES, NoiseSchedule, Regime, check_installed
from fedkeep.generation.pixel import ModelCard, UNet
from fedkeep.generation.training import GeneratorTraining, cluster_subclasses, load_training_data, train_generator
from fedkeep.models.weights import parameter_count


def train_diffusion(options: Namespace, console: Console) -> int:
    """Train a generator, or continue its training."""
    check_installed()
    if options.regime not in get_args(Regime):
        raise ConfigError(
            f"there is no regime {options.regime!r}.{did_you_mean(options.regime, map(str, get_args(Regime)))}"
        )
    device = check_device(options.device)
    sections = {"unet": UNet, "noise_schedule": NoiseSchedule, "training": GeneratorTraining, "data": DataOptions}
    unet, schedule, settings, data_options = read_settings(options.settings, sections).values()
    source = load_training_data(options.data, options.regime, options.data_dir, data_options)
    dataset, data = source.dataset, source.seen
    if not dataset.has_images:
        raise ConfigError(f"{dataset.name} holds no images, and a generator learns from images. Name others.")
    if options.clusters > 1:
        subclasses = cluster_subclasses(data["input"], data["label"], options.clusters, options.seed)
        data = {**data, "subclass": subclasses}
    named = dataset.shape, dataset.label_names, source.name, source.regime
    card = ModelCard(unet, schedule, *named, held_out=source.held_out, clusters_per_class=options.clusters)
    per_class = f", {options.clusters} clusters each" if options.clusters > 1 else ""
    say(console, f"{dataset.name}: {int(source.is_seen.sum()):,} images of {dataset.num_classes} classes{per_class}")
    say(console, f"regime {source.regime}: {REGIMES[source.regime]}")
    try:
        with Display(console, {}, unit="step", quiet=options.quiet) as display:
            generator = train_generator(
                card,
                data,
                settings,
                Path(options.out),
                seed=options.seed,
                device=device,
                half=options.half,
                on_step=lambda done, loss: display.count(done, settings.steps, f"loss {loss:.4f}"),
            )
    except (KeyboardInterrupt, Terminated) as stop:
        return say_stopped(stop, "the same command", console, "finished steps are saved")
    say(console, f"{parameter_count(generator.network):,} parameters, loss {generator.card.training['loss']:.4f}")
    say(console, f"wrote {options.out}")
    return 0
