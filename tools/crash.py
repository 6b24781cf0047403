"""What a run survives: damaged files, kills and signals, failing disks, lost and reordered renames, too little memory.

Each trial of this script spoils one resume of a small run in its own process, then resumes as a user would. The end is
one of three: the result of the run that nothing disturbed, bit for bit; a refusal that names the file; or a loss. The
numbers go into docs/reliability.md: ``python tools/crash.py --count 200 --write``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from damage import DAMAGES, apply_damage, files_of

import fedkeep
from fedkeep._utils.process import Terminated
from fedkeep.errors import FedKeepError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import open_run
from fedkeep.experiment.runtime import Machine
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.reporting.run_folder import read_run
from fedkeep.trials.checkpoint import load_manifest, manifests
from fedkeep.trials.trial import Checkpoints

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- crash:begin (written by make crash) -->", "<!-- crash:end -->"
ROUNDS = 4
RESULTS = ("rounds.jsonl", "model.safetensors", "partition.json", "result.json")
RECIPE = """
title = "crash"
[data]
name = "digits"
[partition]
scheme = "exdir"
num_clients = 4
classes_per_client = 3
alpha = 0.5
[model]
name = "mlp"
hidden = [8]
[training]
epochs = 1
batch_size = 64
lr = 0.05
[run]
rounds = 4
cohort_size = 2
[[methods]]
algorithm = "scaffold"
"""
IDENTICAL, REFUSED, LOST = "identical", "refused by name", "lost or different"


def results(run: Path) -> dict[str, bytes]:
    """Return the bytes of a run's results."""
    (trial,) = (run / "trials").iterdir()
    return {name: (trial / name).read_bytes() for name in RESULTS}


def in_child(work: Callable[[], object], patience: float = 120.0) -> int:
    """Run a function in a forked process without output; return its exit code, negative for a signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            work()
            code = 0
        except FedKeepError:
            code = 1
        except (OSError, MemoryError, RuntimeError):
            code = 2
        except Terminated as stop:
            code = int(stop.code or 0)
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return wait_for(child, patience)


def wait_for(child: int, patience: float) -> int:
    """Wait for a child process; one that hangs is killed and counts as code 99."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 99


def save_every_round() -> None:
    """Let a trial save after every round, so that there is much to strike."""
    Checkpoints.on_round_end = lambda self, state, result: self._save(state)  # type: ignore[method-assign]


def resume(run: Path) -> None:
    """Do what `fedkeep.resume` does, and read the run as a report does; drawing it would take most of the time."""
    experiment = open_run(run, Machine(workers=1))
    run_trials(experiment.trials(run), retry="")
    read_run(run)


def judge(run: Path, whole: dict[str, bytes]) -> str:
    """Resume a run as a user does, and say how it ended."""
    try:
        resume(run)
    except FedKeepError as error:
        names = {file.name for file in files_of(run)} | {"run.json", "recipe.toml", "manifest", ".safetensors", ".json"}
        return REFUSED if any(name in str(error) for name in names) else LOST
    except BaseException as error:
        print(f"{run}: {type(error).__name__}: {error}")
        return LOST
    return IDENTICAL if results(run) == whole else LOST


class Crash:
    """The runs that are spoiled, and the counts.

    Parameters
    ----------
    folder : Path
        Where copies are made.
    seed : int
        Seed of all choices.
    until : float
        The `time.monotonic` after which nothing more is begun.
    """

    def __init__(self, folder: Path, seed: int, until: float) -> None:
        self.folder, self.random, self.until = folder, random.Random(seed), until
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE)
        self.recipe = load_recipe(str(recipe))
        save_every_round()
        fedkeep.run(self.recipe, out=folder / "whole")
        self.whole = results(folder / "whole")

        def stop(progress: Any) -> None:
            if progress.done == ROUNDS // 2:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            fedkeep.run(self.recipe, out=folder / "half", on_progress=stop)
        self.counts: dict[str, Counter[str]] = {}
        self.number = 0

    def strikes(self, count: int) -> Iterator[int]:
        """Count to a number, as long as there is time."""
        return itertools.takewhile(lambda _: time.monotonic() < self.until, range(count))

    def copy(self, name: str) -> Path:
        """Return a new copy of the whole or of the half run."""
        self.number += 1
        run = self.folder / f"{name}-{self.number}"
        shutil.copytree(self.folder / name, run)
        return run

    def count(self, kind: str, outcome: str, run: Path) -> None:
        """Count an outcome; a run that was lost is kept."""
        self.counts.setdefault(kind, Counter())[outcome] += 1
        if outcome == LOST:
            print(f"LOST: {kind}: {run}")
        else:
            shutil.rmtree(run, ignore_errors=True)

    def damage(self, count: int) -> None:
        """Damage a file of a finished or a stopped run: each file in turn, each kind in turn."""
        for number in self.strikes(count):
            run = self.copy(("whole", "half")[number % 2])
            files = files_of(run)
            file = files[number // 2 % len(files)]
            kind = DAMAGES[(number // 2 // len(files) + number // 2) % len(DAMAGES)]
            apply_damage(run / file, kind, self.random)
            self.count("a damaged file", judge(run, self.whole), run)

    def kills(self, count: int) -> None:
        """End a resume at random moments, with SIGKILL or a signal that lets it save."""
        quick = self._seconds()
        for number in self.strikes(count):
            run = self.copy("half")
            how = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT)[number % 5]
            child = os.fork()
            if child == 0:
                os._exit(self._resume_quietly(run))
            time.sleep(self.random.uniform(0, 1.2 * quick))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, how)
            code = wait_for(child, 60)
            fine = code in (0, 128 + how, -how)
            if code == 128 + how:  # it saved
                (trial,) = (run / "trials").iterdir()
                names = manifests(trial / "checkpoint")
                saved = load_manifest(trial / "checkpoint" / names[0]).round if names else 0
                fine = saved == (trial / "rounds.jsonl").read_bytes().count(b"\n")
            kind = "a kill (SIGKILL)" if how is signal.SIGKILL else "SIGTERM, SIGHUP or Ctrl-C"
            self.count(kind, judge(run, self.whole) if fine else LOST, run)

    def _resume_quietly(self, run: Path) -> int:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            resume(run)
        except Terminated as stop:
            return int(stop.code or 0)
        except KeyboardInterrupt:
            return 130
        except BaseException:
            return 70
        return 0

    def _seconds(self) -> float:
        run = self.copy("half")
        began = time.monotonic()
        in_child(lambda: resume(run))
        shutil.rmtree(run)
        return time.monotonic() - began

    def failing_disk(self, count: int) -> None:
        """Let the n-th write, fsync or rename of a resume fail, with "no space left" or "input/output error"."""
        for number in self.strikes(count):
            run = self.copy("half")
            code = (errno.ENOSPC, errno.EIO)[number % 2]
            lasting = number % 3 == 0  # a full disk stays full
            at = self.random.randrange(1, 120)
            exit_code = in_child(lambda run=run, code=code, at=at, lasting=lasting: fail_at(run, code, at, lasting))
            self.count("a full or failing disk", judge(run, self.whole) if exit_code in (0, 1, 2) else LOST, run)

    def small_files(self, count: int) -> None:
        """Limit the size of files, so that the system refuses a write in its middle."""
        for _ in self.strikes(count):
            run, most = self.copy("half"), self.random.randrange(1, 12_000)

            def work(run: Path = run, most: int = most) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
                resume(run)

            self.count(
                "a write cut by the system", judge(run, self.whole) if in_child(work) in (0, 1, 2) else LOST, run
            )

    def power_failures(self, count: int) -> None:
        """Leave what was forced to disk, and a random part of the rest: lost and reordered renames, empty files."""
        for _ in self.strikes(count):
            run, at, choice = self.copy("half"), self.random.randrange(1, 90), self.random.randrange(1 << 30)
            after = run.with_name(f"{run.name}-after")
            code = in_child(
                lambda run=run, at=at, choice=choice, after=after: PowerFailure(run, after, at, choice).run()
            )
            if code == 9:
                shutil.rmtree(run)
                after.rename(run)
            self.count("a power failure", judge(run, self.whole) if code in (0, 9) else LOST, run)

    def memory(self, count: int) -> None:
        """Limit the memory of a resume, so that an allocation fails somewhere."""
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for _ in self.strikes(count):
            run, extra = self.copy("half"), self.random.randrange(0, 6 << 20)

            def work(run: Path = run, extra: int = extra) -> None:
                resource.setrlimit(resource.RLIMIT_AS, (pages + extra, pages + extra))
                resume(run)

            code = in_child(work)
            self.count("a failed allocation", judge(run, self.whole) if code != 99 else LOST, run)


def fail_at(run: Path, code: int, at: int, lasting: bool) -> None:
    """Resume a run whose n-th file operation fails."""
    done = 0

    def strike() -> None:
        nonlocal done
        done += 1
        if done == at or (lasting and done > at):
            raise OSError(code, os.strerror(code))

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            strike()
            return function(*arguments, **options)

        return call

    class Writer(io.FileIO):
        def write(self, content: Any) -> int | None:
            strike()
            return super().write(content)

    path_open = Path.open

    def open_file(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "wb":
            return io.BufferedWriter(Writer(self, "w"))
        if mode == "r+b":
            return io.BufferedRandom(Writer(self, "r+"))
        return path_open(self, mode, *arguments, **options)

    Path.open = open_file  # type: ignore[method-assign,assignment]
    os.fsync, os.replace = failing(os.fsync), failing(os.replace)
    resume(run)


class PowerFailure:
    """Follows what a resume has forced to disk, and at one moment leaves a folder as a power failure may.

    Of a file that was changed since its last fsync, the old content, the new one, a part of it or nothing is left. Of
    the names in a folder that were changed since its last fsync, each is the old or the new one, independently.
    """

    def __init__(self, run: Path, after: Path, at: int, choice: int) -> None:
        self.folder, self.after, self.at, self.random = run.resolve(), after, at, random.Random(choice)
        self.done = 0
        self.contents: dict[int, bytes] = {}  # on disk, by inode
        self.names: dict[Path, dict[str, int]] = {}  # on disk, by folder
        for folder in [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]:
            self.sync_names(folder)
        for file in self.folder.rglob("*"):
            if file.is_file():
                self.contents[file.stat().st_ino] = file.read_bytes()

    def sync_names(self, folder: Path) -> None:
        """Note that a folder's names are on disk."""
        self.names[folder] = {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()}

    def run(self) -> None:
        """Resume, and fail."""
        fsync, replace, unlink = os.fsync, os.replace, os.unlink

        def on_fsync(descriptor: int) -> None:
            self.strike()
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                if path.is_relative_to(self.folder):
                    self.sync_names(path)
            elif path.is_relative_to(self.folder):
                self.contents[os.fstat(descriptor).st_ino] = path.read_bytes()

        def on_replace(*arguments: Any, **options: Any) -> None:
            self.strike()
            replace(*arguments, **options)
            self.strike()

        def on_unlink(*arguments: Any, **options: Any) -> None:
            self.strike()
            unlink(*arguments, **options)

        os.fsync, os.replace, os.unlink = on_fsync, on_replace, on_unlink  # type: ignore[assignment]
        resume(self.folder)

    def strike(self) -> None:
        """Fail at the chosen operation."""
        self.done += 1
        if self.done == self.at:
            self.leave()
            os._exit(9)

    def leave(self) -> None:
        """Write what a power failure leaves."""
        live: dict[int, bytes] = {}
        for folder in [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]:
            now = {path.name: path for path in folder.iterdir() if path.is_file()}
            inodes = {name: path.stat().st_ino for name, path in now.items()}
            live |= {inodes[name]: path.read_bytes() for name, path in now.items()}
            old = self.names.get(folder, {})
            target = self.after / folder.relative_to(self.folder)
            target.mkdir(parents=True, exist_ok=True)
            for name in sorted({*old, *inodes}):
                inode = self.random.choice((old.get(name), inodes.get(name)))
                if inode is not None:
                    (target / name).write_bytes(self.content(inode, live))

    def content(self, inode: int, live: dict[int, bytes]) -> bytes:
        """Return what is left of a file's content."""
        old, new = self.contents.get(inode, b""), live.get(inode, self.contents.get(inode, b""))
        if old == new:
            return new
        same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        kept, rest = new[:same], new[same:]  # what was on disk and was not changed since, and what was
        part = rest[: self.random.randrange(len(rest) + 1)]
        return self.random.choice((old, new, kept + part, kept + bytes(len(rest)), kept))


def write_page(counts: dict[str, Counter[str]], seconds: float) -> None:
    """Replace the script's part of the page."""
    rows = [
        f"| {kind} | {sum(found.values())} | {found[IDENTICAL]} | {found[REFUSED]} | {found[LOST]} |"
        for kind, found in counts.items()
    ]
    table = "\n".join(
        [
            "| what struck a resume | times | bit-identical result | refused, file named | lost or different |",
            "|:--|--:|--:|--:|--:|",
            *rows,
        ]
    )
    replace_part(PAGE, BEGIN, END, f"{table}\n\nMeasured by `make crash` in {seconds / 60:.0f} minutes.")


def replace_part(page: Path, begin: str, end: str, content: str) -> None:
    """Replace what stands between two markers of a page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}", encoding="utf-8")


def main() -> int:
    """Run all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="times that each kind strikes")
    parser.add_argument("--damages", type=int, default=315, help="files that are damaged")
    parser.add_argument("--minutes", type=float, default=60.0, help="no kind begins another strike after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="one kind, such as damage")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedkeep-crash-") as folder:
        crash = Crash(Path(folder), options.seed, began + 60 * options.minutes)
        kinds = {
            "damage": lambda: crash.damage(options.damages),
            "kills": lambda: crash.kills(options.count),
            "disk": lambda: crash.failing_disk(options.count),
            "small": lambda: crash.small_files(options.count // 4),
            "power": lambda: crash.power_failures(options.count),
            "memory": lambda: crash.memory(options.count // 2),
        }
        for name, work in kinds.items():
            if options.only in ("", name):
                work()
                if options.write:
                    write_page(crash.counts, time.monotonic() - began)
                print(name, {kind: dict(found) for kind, found in crash.counts.items()}, flush=True)
    return int(any(found[LOST] for found in crash.counts.values()))


if __name__ == "__main__":
    sys.exit(main())
