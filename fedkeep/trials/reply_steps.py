"""The order of the reply steps: what happens to a reply between its client and the method.

`ReplyStep` says when the methods of a step are called. At each such moment the steps take their turns in this order.
"""

from collections.abc import Sequence

from fedkeep.privacy.central_noise import CentralNoise
from fedkeep.privacy.privacy_account import PrivacyAccount
from fedkeep.privacy.secure_sum import SecureSum
from fedkeep.rounds.evaluation_steps import ClientTest, LocalModels
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.trust.attacks import Attacker
from fedkeep.trust.loss_check import LossCheck
from fedkeep.trust.plausibility_check import PlausibilityCheck
from fedkeep.trust.robust_aggregation import RobustAggregation
from fedkeep.trust.standing import Standing
from fedkeep.trust.updates import Updates


def reply_steps(own: Sequence[ReplyStep] = ()) -> list[ReplyStep]:
    """Return new steps for a run; the user's own come after the built-in checks, and before robust aggregation."""
    account, standing = PrivacyAccount(), Standing()
    return [
        Attacker(),
        account,
        SecureSum(),
        PlausibilityCheck(),
        Updates(),
        LossCheck(),
        *own,
        standing,
        RobustAggregation(),
        CentralNoise(account),
        LocalModels(),
        ClientTest(),
    ]
