"""``fedkeep doctor``: what this machine has for FedKeep, and what to do about what it lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
from argparse import Namespace
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from fedkeep.cli.text import plain_table
from fedkeep.data import known_datasets
from fedkeep.data.cache import cache_folder
from fedkeep.errors import DataError, install_command
from fedkeep.experiment.runtime import describe_version

USES = {
    "data": "images, Parquet files and data sets of the Hugging Face Hub",
    "flower": "runs across machines",
    "diffusion": "image generators and pre-trained extractors",
    "export": "models as ONNX",
    "pandas": "run.table() in Python",
    "ray": "--executor ray",
    "tracking": "--log tensorboard, wandb or mlflow",
    "tune": "fedkeep tune --search",
}
"""What extras are for; others are for FedKeep's own development."""
GIGABYTE = 10**9


@dataclass(frozen=True)
class DoctorLine:
    """A line of the report.

    ``subject``: What was looked at.
    ``found``: What is there.
    ``advice``: What to do; empty if nothing is missing.
    """

    subject: str
    found: str
    advice: str = ""


def doctor(options: Namespace, console: Console) -> int:
    """Show what this machine has, and what to do about what it lacks.

    Returns: The exit code: 0, also where something optional is missing; 1 if FedKeep cannot run.
    """
    found = run_checks(options.data_dir)
    table = plain_table("", "found", "what to do")
    for check in found:
        table.add_row(check.subject, escape(check.found), escape(check.advice))
    console.print(table)
    broken = [check for check in found if check.subject == "packages" and check.advice]
    console.print("FedKeep cannot run: see packages." if broken else "FedKeep can run here. Start with: fedkeep run")
    return 1 if broken else 0


def run_checks(data_dir: str | None = None) -> list[DoctorLine]:
    """Look at versions, processor, memory, GPU, data, cache and extras. Nothing is sent or downloaded.

    ``data_dir``: Folder of local data sets; default: ``FEDKEEP_DATA``.
    Returns: What was found.
    """
    return [
        DoctorLine("versions", f"{describe_version()}, Python {platform.python_version()} on {platform.system()}"),
        _packages(),
        *_processor(),
        _gpu(),
        _data(data_dir),
        _cache(),
        *(_extra(extra, use) for extra, use in USES.items()),
    ]


def _packages() -> DoctorLine:
    """Compare the packages that FedKeep always needs with their ranges."""
    wrong = _missing("")
    advice = f"pip install {' '.join(repr(str(need)) for need in wrong)}" if wrong else ""
    return DoctorLine(
        "packages", f"{len(wrong)} missing or of another version" if wrong else "all that are needed", advice
    )


def _processor() -> list[DoctorLine]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = DoctorLine("processor", f"{usable} cores, of which a run uses all: one trial or one cohort's part on each")
    advice = ""
    if torch.get_num_threads() > 1 and usable > 1:
        advice = "from Python on a busy machine: set OMP_NUM_THREADS=1 (the command line does it by --threads 1)"
    threads = DoctorLine("threads", f"PyTorch would use {torch.get_num_threads()} in a process", advice)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return [cores, threads]
    enough = memory / usable > GIGABYTE
    advice = "" if enough else f"each worker needs about 1 GB: --workers {max(1, memory // (2 * GIGABYTE))}"
    return [cores, threads, DoctorLine("memory", f"{memory / GIGABYTE:.0f} GB", advice)]


def _gpu() -> DoctorLine:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        text = "; ".join(f"{each.name}, {each.total_memory / GIGABYTE:.0f} GB" for each in names)
        return DoctorLine("GPU", text, "use it: --device cuda")
    if shutil.which("nvidia-smi"):
        return DoctorLine(
            "GPU", "there seems to be one, which this PyTorch cannot use",
            "install the CUDA build of PyTorch (about 5 GB): https://pytorch.org/get-started/locally",
        )  # fmt: skip
    return DoctorLine("GPU", "none; networks compute on the processor")


def _data(data_dir: str | None) -> DoctorLine:
    given = data_dir or os.environ.get("FEDKEEP_DATA")
    always = "the digits are always there"
    if not given:
        return DoctorLine(
            "data", f"no folder is named; {always}, other data are downloaded when they are used",
            "with data of your own: export FEDKEEP_DATA=DIR, or --data-dir DIR",
        )  # fmt: skip
    try:
        known = known_datasets(given).items()
        local = [name for name, entry in known if entry.location and Path(str(entry.location)).exists()]
    except DataError as error:
        return DoctorLine("data", str(error), "correct FEDKEEP_DATA or --data-dir")
    if not local:
        return DoctorLine(
            "data", f"{given} holds none of the known data sets; {always}",
            "copy Parquet files as on the Hub, such as zalando-datasets/fashion_mnist/train.parquet",
        )  # fmt: skip
    return DoctorLine("data", f"{given}: {', '.join(local)}")


def _cache() -> DoctorLine:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    text = f"{folder}, {sum(files) / GIGABYTE:.1f} GB in {len(files)} files, {free / GIGABYTE:.0f} GB free"
    if not os.access(existing, os.W_OK):
        return DoctorLine("cache", text, "it cannot be written: export FEDKEEP_CACHE=DIR")
    return DoctorLine("cache", text, "make room, or export FEDKEEP_CACHE=DIR" if free < 2 * GIGABYTE else "")


def _extra(extra: str, use: str) -> DoctorLine:
    if not _needs(extra):
        return DoctorLine(f"extra {extra}", "not known to the installed version", "install FedKeep again")
    missing = _missing(extra)
    if not missing:
        return DoctorLine(f"extra {extra}", f"installed: {use}")
    names = ", ".join(need.name for need in missing)
    return DoctorLine(f"extra {extra}", f"without {names}: no {use}", f"if you need it: {install_command(extra)}")


def _missing(extra: str) -> list[Requirement]:
    """Return what an extra needs (or FedKeep itself, for "") and that is missing or of another version."""
    missing = []
    for need in _needs(extra):
        try:
            # A local build, such as 2.13.0+cpu, counts as its version.
            there = re.sub(r"\+.*", "", version(need.name))
        except PackageNotFoundError:
            missing.append(need)
            continue
        if not need.specifier.contains(there, prereleases=True):
            missing.append(need)
    return missing


def _needs(extra: str) -> list[Requirement]:
    """Return what an extra needs, or, for "", what FedKeep always needs."""
    wanted = [Requirement(line) for line in requires("fedkeep") or ()]
    return [need for need in wanted if _belongs(need, extra)]


def _belongs(need: Requirement, extra: str) -> bool:
    if need.name.lower() == metadata("fedkeep")["Name"].lower():
        return False
    if need.marker is None:
        return not extra
    return need.marker.evaluate({"extra": extra}) and bool(extra) and not need.marker.evaluate({"extra": ""})
