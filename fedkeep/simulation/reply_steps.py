"""The order of the reply steps: what happens to a reply between its client and the method.

`ReplyStep` says when the methods of a step are called. At each such moment the steps take their turns in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedkeep.simulation.attacks import Attacker
from fedkeep.simulation.central_dp import CentralNoise
from fedkeep.simulation.collapse import Collapse
from fedkeep.simulation.local_models import LocalModels
from fedkeep.simulation.loss_checker import LossCheck
from fedkeep.simulation.plausible import Plausible
from fedkeep.simulation.privacy_account import PrivacyAccount
from fedkeep.simulation.reply_step import ReplyStep
from fedkeep.simulation.robust import Robust
from fedkeep.simulation.secure_sum import SecureSum
from fedkeep.simulation.standing import Standing
from fedkeep.simulation.updates import Updates


def reply_steps(own: Sequence[ReplyStep] = ()) -> list[ReplyStep]:
    """Return new steps for a run; the user's own come after the built-in checks, and before robust aggregation."""
    account, standing = PrivacyAccount(), Standing()
    return [
        Attacker(),
        account,
        SecureSum(),
        Plausible(),
        Updates(),
        LossCheck(standing),
        *own,
        standing,
        Collapse(),
        Robust(),
        CentralNoise(account),
        LocalModels(),
    ]
