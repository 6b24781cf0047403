"""What a second process leaves of the teachers' cost: a profile of SFedKD's rounds, beside FedSeq's.

SFedKD's Fashion-MNIST setting (peers/recipes/w2.toml), in which one process trains while another asks the teachers of
the next clients. FedSeq, SFedKD alone, and SFedKD with two processes play the same rounds in turns, in an order that
changes; ratios are taken within a round. The profile says where a round with two processes goes, as its server sees it.

    python benchmarks/second_core.py [--rounds 12] [--data-dir DIR]

writes its result beside itself. It needs the data set, since a second process reads it from the data folder.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_overhead import SHAPES, Helped, engine, gain, measure, setting
from telling import arguments, beginning
from torch import Tensor

from fedkeep.executors.process_executor import ProcessExecutor, RequestGroup

PARTS = {
    "first teachers": "until the first client trains: choosing teachers, and asking them for this client",
    "training": "local training, as the workers time it",
    "messages": "from sending a training until its result is there, less the training itself",
    "between": "from a client's result until the next one's training is sent: checks, and waiting for teachers",
    "rest": "after the last result",
}


class TimedExecutor(ProcessExecutor):
    """Notes when each training of a round was sent, when its result came, and the seconds that it took there."""

    def __init__(self, inner: ProcessExecutor) -> None:
        super().__init__(inner.workers, inner.state)
        self.sent: dict[RequestGroup, float] = {}
        self.trained: list[tuple[float, float, float]] = []

    def _dispatch(self) -> None:
        before = set(self.under_way.values())
        super()._dispatch()
        self.sent |= dict.fromkeys(set(self.under_way.values()) - before, time.perf_counter())

    def _accept(self, group: RequestGroup, kind: str, content: Any, tensors: Mapping[str, Tensor]) -> None:
        timer, now = self.state.context.timer, time.perf_counter()
        before = timer.train
        super()._accept(group, kind, content, tensors)
        sent = self.sent.pop(group)
        if group.requests[0].step.__name__ == "train":
            self.trained.append((sent, now, timer.train - before))

    def profile(self, began: float, ended: float) -> dict[str, float]:
        """Return the seconds of each part of the round that has ended, and forget it."""
        trained, self.trained = sorted(self.trained), []
        sent, came, seconds = zip(*trained, strict=True)
        return {
            "first teachers": sent[0] - began,
            "training": sum(seconds),
            "messages": sum(came) - sum(sent) - sum(seconds),
            "between": sum(sent[1:]) - sum(came[:-1]),
            "rest": ended - came[-1],
        }


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds, after two to warm up (12)")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe, dataset, federation = setting("w2", "fashion-mnist", options.data_dir)
    if dataset.name not in SHAPES:
        sys.exit("Fashion-MNIST is not in the data folder: give it with --data-dir.")
    alone = {name: engine(recipe, name, federation) for name in ("fedseq", "sfedkd")}
    profiles: list[dict[str, float]] = []
    training: dict[str, list[float]] = {name: [] for name in alone}

    def plays(name: str) -> Callable[[], None]:
        def play() -> None:
            training[name].append(alone[name].run_round().timings["train"])

        return play

    with tempfile.TemporaryDirectory() as folder:
        helped = Helped(recipe, federation, Path(folder), options.data_dir)
        assert isinstance(helped.engine.executor, ProcessExecutor)
        executor = helped.engine.executor = TimedExecutor(helped.engine.executor)

        def with_second() -> None:
            began = time.perf_counter()
            helped.round()
            profiles.append(executor.profile(began, time.perf_counter()))

        seconds = measure({**{name: plays(name) for name in alone}, "helped": with_second}, options.rounds)
        helped.workers.on_trial_end(helped.engine)
    text = report(seconds, training, profiles[-options.rounds :], options)
    print(text)
    options.out.write_text(text)


def report(
    seconds: Mapping[str, Sequence[float]],
    training: Mapping[str, Sequence[float]],
    profiles: Sequence[Mapping[str, float]],
    options: Any,
) -> str:
    """Return the result as Markdown."""
    title, command = "SFedKD with a second process", f"second_core.py --rounds {options.rounds}"
    names = {"fedseq": "FedSeq", "sfedkd": "SFedKD, one process", "helped": "SFedKD, two processes"}
    base = seconds["fedseq"]
    trained = {name: list(values)[-options.rounds :] for name, values in training.items()}
    trained["helped"] = [profile["training"] for profile in profiles]
    rows = [
        f"| {label} | {statistics.median(seconds[name]):.2f} | {statistics.median(trained[name]):.2f} | "
        f"{gain(seconds[name], base)} | {gain(trained[name], trained['fedseq'])} |"
        for name, label in names.items()
    ]
    parts = [
        f"| {meaning} | {statistics.median(profile[part] for profile in profiles):.3f} | "
        f"{statistics.median(p[part] / b for p, b in zip(profiles, base, strict=True)):.3f} |"
        for part, meaning in PARTS.items()
    ]
    return "\n".join(
        [
            *beginning(title, command, options.note, where="one thread a process"),
            "Seconds a round (median), and times FedSeq's in the same round (median, middle half). The target is 1.10.",
            "",
            "| method | round, s | of it training, s | round, times FedSeq's | training, times FedSeq's |",
            "|:--|--:|--:|--:|--:|",
            *rows,
            "",
            "Where a round with two processes goes:",
            "",
            "| part | s | of FedSeq's round |",
            "|:--|--:|--:|",
            *parts,
            "",
        ]
    )


if __name__ == "__main__":
    main()
