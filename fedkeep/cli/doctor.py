"""``fedkeep doctor``: what this machine has for FedKeep, and what to do about what it lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from fedkeep.cli.text import plain_table
from fedkeep.data import known_datasets
from fedkeep.data.cache import cache_folder
from fedkeep.errors import DataError, install_command
from fedkeep.experiment.runtime import describe_version, usable_cores

USES = {
    "data": "images, Parquet files and data sets of the Hugging Face Hub",
    "flower": "runs across machines",
    "diffusion": "image generators and pre-trained extractors",
    "export": "models as ONNX",
    "pandas": "run.table() in Python",
    "ray": "--executor ray",
    "tracking": "--log tensorboard, wandb or mlflow",
}
"""What extras are for; others are for FedKeep's own development."""
GIGABYTE = 10**9


class DoctorLine(NamedTuple):
    """What was looked at, what is there, and what to do; there is no advice if nothing is missing."""

    subject: str
    found: str
    advice: str = ""


def doctor(options: Namespace, console: Console) -> int:
    """Show what this machine has; the exit code is 1 if FedKeep cannot run."""
    lines = run_checks(options.data_dir)
    table = plain_table("", "found", "what to do")
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
    broken = any(line.subject == "packages" and line.advice for line in lines)
    console.print("FedKeep cannot run: see packages." if broken else "FedKeep can run here. Start with: fedkeep run")
    return int(broken)


def run_checks(data_dir: str | None = None) -> list[DoctorLine]:
    """Look at versions, processor, GPU, data, cache and extras. Nothing is sent or downloaded."""
    wrong, cache = _missing(""), cache_folder()
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    return [
        DoctorLine("versions", f"{describe_version()}, Python {platform.python_version()} on {platform.system()}"),
        DoctorLine(
            "packages",
            f"{len(wrong)} missing or of another version" if wrong else "all that are needed",
            f"pip install {' '.join(repr(str(need)) for need in wrong)}" if wrong else "",
        ),
        DoctorLine("processor", f"{usable_cores()} cores, of which a run uses all unless --workers says fewer"),
        _gpu(),
        _data(data_dir),
        DoctorLine(
            "cache",
            f"{cache}, {free / GIGABYTE:.0f} GB free",
            "make room, or export FEDKEEP_CACHE=DIR" if free < 2 * GIGABYTE else "",
        ),
        *(_extra(extra, use) for extra, use in USES.items()),
    ]


def _gpu() -> DoctorLine:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        return DoctorLine("GPU", names, "use it: --device cuda")
    if shutil.which("nvidia-smi"):
        advice = "install the CUDA build of PyTorch (about 5 GB): https://pytorch.org/get-started/locally"
        return DoctorLine("GPU", "there seems to be one, which this PyTorch cannot use", advice)
    return DoctorLine("GPU", "none; networks compute on the processor")


def _data(data_dir: str | None) -> DoctorLine:
    given = data_dir or os.environ.get("FEDKEEP_DATA")
    if not given:
        advice = "with data of your own: export FEDKEEP_DATA=DIR, or --data-dir DIR"
        return DoctorLine("data", "no folder is named; all but the digits are downloaded when they are used", advice)
    try:
        known = known_datasets(given).items()
    except DataError as error:
        return DoctorLine("data", str(error), "correct FEDKEEP_DATA or --data-dir")
    local = [name for name, entry in known if entry.location and Path(str(entry.location)).exists()]
    advice = "copy Parquet files as on the Hub, such as zalando-datasets/fashion_mnist/train.parquet"
    return DoctorLine("data", f"{given}: {', '.join(local) or 'no known data set'}", "" if local else advice)


def _extra(extra: str, use: str) -> DoctorLine:
    if missing := ", ".join(need.name for need in _missing(extra)):
        return DoctorLine(f"extra {extra}", f"without {missing}: no {use}", f"if you need it: {install_command(extra)}")
    return DoctorLine(f"extra {extra}", f"installed: {use}")


def _missing(extra: str) -> list[Requirement]:
    """Return what an extra needs (or FedKeep itself, for "") and that is missing or of another version."""
    missing = []
    for need in map(Requirement, requires("fedkeep") or ()):
        of_extra = need.marker is not None and not need.marker.evaluate({"extra": ""})
        if of_extra != bool(extra) or (need.marker is not None and not need.marker.evaluate({"extra": extra})):
            continue
        try:
            # A local build, such as 2.13.0+cpu, counts as its version.
            found = need.specifier.contains(re.sub(r"\+.*", "", version(need.name)), prereleases=True)
        except PackageNotFoundError:
            found = False
        if not found:
            missing.append(need)
    return missing
