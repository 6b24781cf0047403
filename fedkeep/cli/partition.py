"""``fedkeep partition``: split a data set over clients and describe the result."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedkeep._utils import progress
from fedkeep._utils.files import atomic_write
from fedkeep.cli.text import plain_table, say
from fedkeep.data.data_options import DataOptions
from fedkeep.data.dataset import DataSet
from fedkeep.data.partition import get_scheme
from fedkeep.data.partition.base import partition_statistics
from fedkeep.display import LINE_SECONDS
from fedkeep.errors import ConfigError
from fedkeep.experiment.build import load_data
from fedkeep.experiment.overrides import apply_overrides, parse_value
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import check_validation
from fedkeep.options import build
from fedkeep.reporting.figures import partition_figure


def partition(options: Namespace, console: Console) -> int:
    """Split a data set over clients; print statistics and write the heat map or the manifest."""
    import_user_code(options.use)
    chosen = get_scheme(options.scheme)
    table = {}
    for setting in options.options:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {setting!r}: write option=value, such as alpha=0.5.")
        table[name] = parse_value(value)
    if options.clients:
        table["num_clients"] = options.clients
    scheme = build(chosen, table, f"scheme {options.scheme}")
    dataset = _load(options)
    with progress.subscribe(lambda activity, _: say(console, f"{activity} …"), LINE_SECONDS):
        split = scheme.split(dataset.train, dataset.num_classes, options.seed)
    counts = split.counts(dataset.train["label"], dataset.num_classes)

    statistics = plain_table("statistic", "value")
    manifest = split.manifest()
    for name in ("scheme", "attempts"):
        statistics.add_row(name, str(manifest[name]))
    for name, value in partition_statistics(counts).items():
        statistics.add_row(name.replace("_", " "), f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    console.print(statistics)
    say(console, f"hash {manifest['hash']}")

    if options.out and Path(options.out).suffix not in (".svg", ".json"):
        raise ConfigError(f"--out {options.out}: the heat map is written as .svg, the manifest as .json.")
    out = Path(options.out or f"{dataset.name.replace('/', '-')}-{options.scheme}-seed{options.seed}.svg")
    if out.suffix == ".json":
        atomic_write(out, json.dumps(manifest | {"counts": counts.tolist()}))
    else:
        title = f"{dataset.name}, {options.scheme}, {len(split)} clients"
        atomic_write(out, partition_figure(counts.numpy(), dataset.label_names, title))
    say(console, f"wrote {out}")
    return 0


def _load(options: Namespace) -> DataSet:
    """Load the data set with the options of ``[data]`` that ``--set`` names."""
    table: dict[str, Any] = {"data": {}}
    apply_overrides(table, options.settings)
    if others := [section for section in table if section != "data"]:
        raise ConfigError(
            f"--set {others[0]}: here only options of [data] can be set, such as data.label=species. Options of the "
            "scheme stand after its name, such as alpha=0.5."
        )
    validation = table["data"].pop("validation", 0.0)
    check_validation(validation)
    return load_data(options.dataset, options.data_dir, validation, build(DataOptions, table["data"], "--set data"))
