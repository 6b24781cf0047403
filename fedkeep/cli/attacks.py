"""``fedkeep attacks``: run a table of attacks, and show it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.torch_state import plain_torch
from fedkeep.experiment.attack_table import KINDS, AttackTrial, attack_table, false_alarms, run_attacks


def attacks(options: Namespace, console: Console) -> int:
    """Run the trials that the table lacks, and print the table of each defence."""

    def show(trial: AttackTrial) -> None:
        who = f"{trial.method}, {trial.kind} {trial.share:.0%}, defence {trial.defense}, seed {trial.seed}"
        console.print(f"{who}: {trial.accuracy:.1%}", highlight=False, markup=False)

    with plain_torch(1):
        trials = run_attacks(
            options.recipe,
            Path(options.out),
            kinds=options.kinds or KINDS,
            shares=options.shares,
            defenses=options.defenses,
            seeds=options.seeds or (0, 1, 2),
            methods=options.methods or (),
            settings=options.settings or (),
            on_trial=show,
        )
    for defense in options.defenses:
        refused, asked = false_alarms(trials, defense)
        console.print(f"\nDefence {defense}: accuracy in %, by share of malicious clients\n", highlight=False)
        console.print(attack_table(trials, defense), highlight=False, markup=False, soft_wrap=True)
        console.print(f"\nHonest replies refused without attackers: {refused} of {asked}.", highlight=False)
    return 0
