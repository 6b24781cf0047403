"""FedKeep as a user runs it: ``with_fedkeep.py RECIPE METHOD WORKERS DATA_DIR RUN_FOLDER``.

The run waits for its turns where a run tells of its progress, between rounds. What the engine makes of the cohort
(worker processes, stacking) is its own choice.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch
from turns import Shown, Turns

import fedkeep
from fedkeep.interface.codec import decode
from fedkeep.models import Weights
from fedkeep.trials.checkpoint import load_manifest, manifests


def main() -> None:
    """Play rounds when asked."""
    recipe, method, workers, data_dir, folder = sys.argv[1:]
    turns, begun = Turns(lambda: last_saved(Path(folder))), False

    def on_progress(_: object) -> None:
        nonlocal begun
        # The first round also sets up; a run has no moment before it, so it counts as start-up.
        going = turns.done() if begun else turns.begin("fedkeep", "torch")
        begun = True
        if not going:
            raise KeyboardInterrupt  # as a user stops a run

    machine = fedkeep.Machine(workers=int(workers), data_dir=data_dir)
    with suppress(KeyboardInterrupt):
        fedkeep.run(fedkeep.load_recipe(recipe, methods=[method]), out=folder, machine=machine, on_progress=on_progress)


def last_saved(folder: Path) -> Shown:
    """Return the model in a run's checkpoint, which is of its last rounds: a run shows no other before its end."""
    (checkpoint,) = folder.glob("trials/*/checkpoint")
    manifest = load_manifest(checkpoint / manifests(checkpoint)[0])
    weights = decode((checkpoint / manifest.model).read_bytes(), Weights, torch.device("cpu"))
    return {name: tensor.numpy() for name, tensor in weights.items()}, manifest.round


if __name__ == "__main__":
    main()
