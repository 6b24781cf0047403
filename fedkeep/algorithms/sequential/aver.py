"""AVER, EBKD, CA-MKD: plain distillation from SFedKD's teachers, weighted alike, by entropy or by being right.

"FedSeq + X" of SFedKD's table 2: teachers, their number, selection and schedule are SFedKD's; only the loss differs.
The paper gives neither weight nor temperature: weight 1, and temperature 1 without tau squared, as in SFedKD.
"""

from dataclasses import dataclass

from fedkeep.algorithms.sequential.teachers import (
    PreparedDistillation,
    PreviousRound,
    log_teachers,
    prepare_distillation,
    select_teachers,
    take_distillation,
)
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.interface.algorithm import send_label_counts
from fedkeep.losses import CrossEntropy, FullKL, FullKLByConfidence, FullKLByEntropy, Scale, WeightRule
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class AVER(Algorithm[PreviousRound, PreparedDistillation]):
    """Averaged distillation: CE + s * w_full * 1/K sum_k KL(p^k || p^S), where s is 1 or tau^2.

    The first round has no teachers. With ``teachers=0`` this is FedSeq, bit for bit.
    """

    paper = "You et al., 2017: Learning from multiple teacher networks"
    sequential = True

    tau: float = option(1.0, "softmax temperature; the paper prints none", low=1e-3)
    kd_scale: Scale = option("none", "whether the distillation is multiplied by tau squared")
    teachers: int = option(5, "models of the previous round that teach; 0 is FedSeq", low=0)
    w_full: float = option(1.0, "weight of the distillation", low=0.0)

    send_label_counts = send_label_counts

    def round(self, server: Server[PreviousRound], cohort: Cohort) -> None:
        """Choose teachers, let clients prepare them, then pass the model from client to client."""
        state = server.state
        if self.teachers:
            state.label_counts |= cohort.without(state.label_counts).ask(self.send_label_counts)
            chosen = select_teachers(server, self.teachers, "greedy", "kl")
            students = [client.id for client in cohort if client.id in state.label_counts]
            rules = dict.fromkeys(students, self.rule() if chosen else None)
            log_teachers(server, chosen)
            cohort.start(self.prepare, [state.models[name] for name in chosen], each(rules))
        models: dict[str, Weights] = {}
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
                if self.teachers and reply.num_steps:
                    models[client.id] = reply.model
        state.models = models

    def rule(self) -> WeightRule:
        """Return how teachers are weighted."""
        return FullKL(self.w_full)

    @on_client
    def prepare(self, client: Client[PreparedDistillation], teachers: list[Weights], rule: WeightRule | None) -> None:
        """Compute the teachers' outputs while waiting for the model."""
        prepare_distillation(client, teachers, rule, self.tau, self.kd_scale)

    @on_client
    def train(self, client: Client[PreparedDistillation], model: Weights) -> Fit:
        """Train the model of the previous client on labels and on the teachers' outputs."""
        return client.fit(model, CrossEntropy() + take_distillation(client))


@dataclass(frozen=True)
class EBKD(AVER):
    """Entropy-based distillation: teachers that are sure of an example count more (see `FullKLByEntropy`)."""

    paper = "Kwon et al., 2020: Adaptive knowledge distillation based on entropy"

    def rule(self) -> WeightRule:
        return FullKLByEntropy(self.w_full)


@dataclass(frozen=True)
class CAMKD(AVER):
    """Confidence-aware distillation: teachers that are right about an example count more (see `FullKLByConfidence`).

    Only the part on logits: clients that see different classes leave no other reading of its use in table 2.
    """

    title = "CA-MKD"
    paper = "Zhang et al., 2022: Confidence-aware multi-teacher knowledge distillation"

    def rule(self) -> WeightRule:
        return FullKLByConfidence(self.w_full)
