"""Run 377 small simulations over attacks, defences and privacy, and digest the records and the final model of each.

    python tools/reply_golden.py --out before.json           at one revision, some minutes
    python tools/reply_golden.py --out after.json            at another, on the same machine
    python tools/equality.py --compare before.json after.json

Equal digests show that a change of the reply's way changed nothing. Cases under ``resume/`` are saved after two rounds,
and another simulation goes on. ``--only PATTERN`` runs only cases that match, such as ``'sfedkd/*'``.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fedkeep.interface import algorithms
from fedkeep.interface.privacy import Privacy
from fedkeep.rounds.run_settings import Attack, Defense
from fedkeep.testing.runs import simulation, simulation_with_tasks
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import Simulation

DEFENCES: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"check_replies": False},
    "loss": {"loss_check": "server", "loss_slack": 0.15},
    "median": {"robust_aggregation": "median"},
    "trim": {"robust_aggregation": "trimmed_mean"},
    "clip": {"robust_aggregation": "norm_clipping"},
    "krum": {"robust_aggregation": "krum"},
    "multi": {"robust_aggregation": "multi_krum"},
    "tight": {"update_norm": 1.05, "model_norm": 0.2, "refusals": 1, "backoff": 2},
}
KINDS = (
    "none silent scaled_update sign_flip reversed_update random_weights label_flip lying_teacher replay false_counts"
)
RESUMED = {"sign_flip", "replay", "none", "random_weights", "secure", "central", "label_flip"}
OPTIONS: dict[str, dict[str, Any]] = {  # as when the first digests were taken, whatever the defaults are now
    "sfedkd": {"tau": 4.0, "kd_scale": "tau2"},
    "fedadkd": {"w_target": 3.0},
    "fedskf": {"tsd": "recombined_sigmoid", "pit": "fused", "scale": 1.0},
}


def cases() -> dict[str, Any]:
    """Return functions that make the simulations, by name."""
    known, found = algorithms(), dict[str, Any]()

    def case(name: str, method: str, make: Any = simulation, **settings: Any) -> None:
        if method in known:
            found[name] = lambda: make(known[method](**OPTIONS.get(method, {})), **settings)

    flip = partial(Attack, share=0.3)
    for m in ("fedavg", "scaffold", "fedseq", "sfedkd", "fednova", "fedadkd"):
        for d, k in itertools.product(DEFENCES, KINDS.split()):
            few = d in ("default", "loss", "median", "krum") and k in ("none", "sign_flip", "replay", "random_weights")
            if few or m in ("fedavg", "sfedkd"):
                attack: Any = Attack(kind=k, share=0.34)  # type: ignore[arg-type]
                case(f"{m}/{d}/{k}", m, rounds=5, cohort_size=5, defense=Defense(**DEFENCES[d]), attack=attack)
    for m in ("fedavg", "fedprox", "fedadkd", "fedcad"):
        of = partial(case, method=m, rounds=4, cohort_size=4)
        if m != "fedadkd":  # which sends more than a model
            of(f"{m}/secure", privacy=Privacy(secure_aggregation=True))
            clipped = Privacy(secure_aggregation=True, clipping_range=0.5)
            of(f"{m}/secure/flip", privacy=clipped, attack=flip("scaled_update"))
            of(f"{m}/central", privacy=Privacy(client_noise_multiplier=0.7))
        private = Privacy(noise_multiplier=0.7, counts_epsilon=2.0)
        case(f"{m}/dpsgd", m, rounds=2, cohort_size=3, privacy=private)
    for m in ("fedavg", "sfedkd", "scaffold"):
        every: Any = ("last", "round", "moving")
        case(f"{m}/dropout", m, rounds=6, cohort_size=4, client_dropout=0.4, min_clients=3)
        case(f"{m}/local", m, rounds=4, cohort_size=4, evaluate_local_models=True, evaluation_models=every)
        case(f"{m}/codec", m, rounds=4, cohort_size=4, through_codec=True)
        case(f"{m}/stack", m, rounds=3, cohort_size=4, stack=3)
    for m in ("fedavg", "sfedkd", "fedlwf", "fedewc", "fedweit", "fedmd", "fedskf", "target"):
        tasks = partial(case, method=m, make=simulation_with_tasks, rounds=3, cohort_size=4)
        tasks(f"tasks/{m}")
        tasks(f"tasks/{m}/tight", defense=Defense(**DEFENCES["tight"]), attack=flip("scaled_update"))
    for name in [n for n in found if n.split("/")[0] in ("fedavg", "sfedkd") and n.split("/")[-1] in RESUMED]:
        found[f"resume/{name}"] = partial(resumed, found[name])
    return found


def resumed(make: Any) -> Simulation:
    """Return a simulation that goes on from the checkpoint of another one after two rounds."""
    first, second = make(), make()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            first.run_round()
        Checkpoint(Path(folder)).save(first, {})
        Checkpoint(Path(folder)).restore(second)
    result: Simulation = second
    return result


def digests(made: Simulation) -> dict[str, str]:
    """Run a simulation to its end and digest its records, without the kinds of faults, and its model."""
    records, weights = [], hashlib.sha256()
    while made.finished < made.rounds:
        record = made.run_round().record
        records.append({name: value for name, value in record.items() if name != "faults"})
    for name, tensor in sorted(dict(made.server.model).items()):
        weights.update(name.encode() + tensor.contiguous().numpy().tobytes())
    told = hashlib.sha256(json.dumps(records, default=str).encode())
    return {"records": told.hexdigest()[:16], "weights": weights.hexdigest()[:16]}


def main() -> int:
    """Write the digests; a case that cannot run is told, and the command ends with code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the digests are written")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only cases that match, such as 'sfedkd/*'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, failed = dict[str, dict[str, str]](), 0
    for name, make in cases().items():
        if fnmatch.fnmatch(name, options.only):
            try:
                found[name] = digests(make())
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")
                failed += 1
    options.out.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} cases in {options.out}; {failed} failed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
