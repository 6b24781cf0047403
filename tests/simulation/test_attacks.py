"""Attacks do what they say, and the check of losses finds them; honest clients pass it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import MethodType, NoneType
from typing import Any

import pytest
import tiny
import torch
from attack_table import COLUMNS, AttackTrial, attack_table, false_alarms, read_attacks, run_attacks

import fedkeep
from fedkeep.algorithms.incremental.fedlwf import FedLwF
from fedkeep.algorithms.incremental.fedskf import FedSKF
from fedkeep.algorithms.incremental.finetune import Finetune
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.data import Federation
from fedkeep.errors import ConfigError, RunError, ValueRefused
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Fit
from fedkeep.interface.codec import decode, encode
from fedkeep.interface.steps import rise_of_loss
from fedkeep.rounds.attack_options import Attack
from fedkeep.rounds.defense import Defense
from fedkeep.rounds.messages import StepRequest, decode_request, encode_request
from fedkeep.rounds.reply_step import Reply
from fedkeep.rounds.round import RoundState
from fedkeep.training.model_check import ClassScores, ModelCheck, mean_of_labels
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import Simulation
from fedkeep.trust import loss_check, loss_checker
from fedkeep.trust.attacks import add_trigger
from fedkeep.trust.loss_check import (
    LogitRise,
    choose_checkers,
    deviation,
    fall_of_loss,
    false_label_likeness,
    largest_loss,
    logit_rise,
    smallest_fall,
    standardised_residual,
    suspected_deviation,
)
from fedkeep.trust.loss_checker import LossCheck, MeasuredModel
from fedkeep.trust.standing import Standing

SETTINGS = ["auxiliary.images_per_class=4", "run.rounds=4", "run.cohort_size=6", "training.epochs=3"]
ZEROS = torch.zeros(10, 10)
COMMON = {"cohort_size": len(tiny.SIZES), "rounds": 2}


def excess(value: float, margin: float = 0.0) -> LogitRise:
    return LogitRise(0, 1, value, margin)


def answers(logits: torch.Tensor) -> ClassScores:
    """How a model answers one image of each class."""
    return ClassScores(logits, torch.arange(len(logits)), torch.eye(len(logits)))


def measured(
    client: str, rise: LogitRise | None, fall: float | None = 0.5, *, number: int = 1, logits: torch.Tensor = ZEROS
) -> MeasuredModel:
    """A model whose logits rose from 0 to some others, if that matters."""
    request = StepRequest(client, FedSeq.train, (), {}, 1, number)
    returned = Reply(request, Fit({}, 1, 1, 0.5))
    one = MeasuredModel(returned, [request], answers(ZEROS), answers(logits), torch.tensor([20.0] + [0.0] * 9))
    vars(one).update(rise=rise, fall=fall)
    return one


@functools.cache
def digits(method: str, *settings: str) -> tuple[Simulation, list[dict[str, Any]]]:
    recipe = load_recipe("fedkeep/attacks", methods=[method], settings=[*SETTINGS, *settings], seeds=[0])
    simulation = Experiment(recipe).simulation(recipe.methods[0], 0)
    return simulation, tiny.run_rounds(simulation)


def test_attackers_are_drawn_by_the_seed() -> None:
    clients = [str(i) for i in range(20)]
    assert len(Attack("replay", 0.3).attackers(clients, 0)) == 6
    assert Attack("replay", 0.3).attackers(clients, 0) == Attack("backdoor", 0.3).attackers(clients, 0)
    assert Attack("replay", 0.3).attackers(clients, 0) != Attack("replay", 0.3).attackers(clients, 1)
    assert Attack().attackers(clients, 0) == frozenset()


def test_attacks_on_examples_change_labels_and_corners() -> None:
    honest = tiny.simulation(FedSeq(), **COMMON)
    flipped = tiny.simulation(FedSeq(), attack=Attack("label_flip", 0.5), **COMMON)
    backdoor = tiny.simulation(FedSeq(), attack=Attack("backdoor", 0.5), **COMMON)
    bad = flipped.attack.attackers(honest.federation.clients, 0)
    for client in honest.federation.clients:
        before = honest.federation.data(client)
        if client not in bad:
            assert flipped.federation.data(client)["label"].equal(before["label"])
            assert backdoor.federation.data(client)["input"].equal(before["input"])
            continue
        assert flipped.federation.data(client)["label"].equal(tiny.CLASSES - 1 - before["label"])
        after = backdoor.federation.data(client)
        assert (after["label"][::2] == 0).all()
        assert after["label"][1::2].equal(before["label"][1::2])
        assert after["input"][1::2].equal(before["input"][1::2])
        assert after["input"][::2].equal(torch.where(torch.tensor(True), add_trigger(before["input"]), 0)[::2])
    assert "backdoor" in tiny.run_rounds(backdoor)[-1]


@pytest.mark.parametrize("method", [FedLwF, FedSKF])
@pytest.mark.parametrize("kind", ["label_flip", "backdoor"])
def test_attacks_on_examples_stay_within_the_tasks_classes(kind: Any, method: Any) -> None:
    tasks = tiny.stream((2, 1), absent=0)
    simulation = tiny.simulation_with_tasks(
        method(), tasks, rounds=1, cohort_size=5, training=tiny.SHORT, attack=Attack(kind, 1.0)
    )
    honest = Federation.from_stream(tasks)
    for task, first in ((1, 0), (2, 2)):
        (record,) = tiny.run_rounds(simulation, 1)
        assert record["task"] == task
        assert not record["lost"]
        assert ("backdoor" in record) == (kind == "backdoor")
        for client in honest.clients:
            before, after = honest.for_task(task).data(client)["label"], simulation.federation.data(client)["label"]
            if kind == "label_flip":
                assert after.equal(1 - before if task == 1 else before), "a task of one class has no other"
            else:
                assert (after[::2] == first).all()
                assert after[1::2].equal(before[1::2])


@pytest.mark.parametrize("kind", ["label_flip", "backdoor"])
def test_attacks_on_examples_are_refused_where_the_examples_are_at_sites(kind: Any) -> None:
    """There they did nothing, and a trial of a defence would have been an honest run."""
    views = pytest.importorskip("fedkeep.flower.views")
    site = views.client_view(tiny.federation(), "0", "hospital")
    with pytest.raises(ConfigError, match=f"attack.kind={kind} changes what .* at its sites"):
        tiny.simulation(FedSeq(), federation=site, cohort_size=1, attack=Attack(kind))
    tiny.simulation(FedSeq(), federation=site, cohort_size=1, attack=Attack("sign_flip"))


def test_an_attack_on_models_is_refused_for_a_method_without_any() -> None:
    def load(kind: str, method: str) -> None:
        load_recipe("demo", methods=[method], settings=[f"attack.kind={kind}", "tasks.num_tasks=2"])

    for kind in ("sign_flip", "random_weights", "false_counts"):
        with pytest.raises(ConfigError, match=f"FedWeIT's clients return no models, so that attack.kind={kind}"):
            load(kind, "fedweit")
        load(kind, "fedlwf")
    for kind in ("none", "silent", "label_flip", "backdoor"):
        load(kind, "fedweit")


@pytest.mark.parametrize("kind", ["scaled_update", "sign_flip", "reversed_update", "lying_teacher", "label_flip"])
def test_the_server_finds_attackers_and_no_one_else(kind: str) -> None:
    honest, _ = digits("fedseq")
    checked, records = digits("fedseq", "defense.loss_check=server")
    assert not any(record["lost"] for record in records)
    assert tiny.equal(honest.server.model, checked.server.model), "a check that refuses nobody changes nothing"
    attacked, records = digits("fedseq", "defense.loss_check=server", f"attack.kind={kind}", "attack.share=0.3")
    bad = attacked.attack.attackers(attacked.federation.clients, 0)
    refused = {client for record in records for client in record.get("refused", ())}
    assert refused
    assert refused <= bad


@pytest.mark.parametrize("method", ["fedseq", "fedavg"])
def test_a_model_that_knows_its_clients_classes_and_nothing_else_any_more_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update is no longer than any may be, and the loss on the client's own classes falls."""
    recipe = load_recipe("fedkeep/attacks", methods=[method], settings=[*SETTINGS, "defense.loss_check=server"])
    simulation = Experiment(recipe).simulation(recipe.methods[0], 0)
    tiny.run_rounds(simulation, 2)
    labels = {client: simulation.federation.data(client)["label"] for client in simulation.sample_cohort(3)}
    liar = min(labels, key=lambda client: len(labels[client].unique()))
    own = labels[liar].unique()

    def shouting(client: Any, fit: Any) -> Any:
        if client.id != liar:
            return fit
        name = [name for name, tensor in fit.model.items() if tensor.dim() > 1][-1]
        louder = fit.model[name].clone()
        louder[own] += 12 / louder[own].numel() ** 0.5  # the model's norm is 5
        return replace(fit, model=fit.model | {name: louder})

    monkeypatch.setattr(loss_check, "LOSS_FACTOR", 5.0)  # so soon, the usual loss is that of a guess
    tiny.change_replies(simulation, "train", shouting)
    (record,) = tiny.run_rounds(simulation, 1)
    assert list(record["lost"]) == record["refused"] == [liar]
    assert "ruined: its mean loss over all classes is" in record["lost"][liar]
    assert len(tiny.step(simulation, LossCheck).kept.losses) == 2 * 6 + 5


def test_a_loss_is_too_large_beside_those_of_the_last_models() -> None:
    assert largest_loss([9.0] * 7) == 50, "too few are known"
    assert largest_loss([0.5] * 8) == 10
    assert largest_loss([0.5] * 9 + [8.0] * 32) == 80


def test_other_clients_find_attackers_too() -> None:
    _, records = digits(
        "fedseq",
        "defense.loss_check=clients",
        "attack.kind=reversed_update",
        "attack.share=0.2",
        "auxiliary.images_per_class=0",
    )
    assert any(record.get("refused") for record in records)


@pytest.mark.parametrize(("rise", "refused"), [(0.7, False), (0.8, True)])
def test_clients_may_measure_five_times_the_rise_that_a_server_may(rise: float, refused: bool) -> None:
    """A server refuses a model whose loss rose by more than 0.15; clients measure on few examples."""
    recipe = load_recipe("fedkeep/attacks", methods=["fedseq"], settings=[*SETTINGS, "defense.loss_check=clients"])
    simulation = Experiment(recipe).simulation(recipe.methods[0], 0)
    tiny.change_replies(simulation, "rise_of_loss", lambda client, reply: rise)
    (record,) = tiny.run_rounds(simulation, 1)
    assert bool(record.get("refused")) == refused


def test_the_steps_of_the_loss_check_are_known_where_losses_are_checked() -> None:
    """A method does not have them, so a worker process and a site look them up by name."""
    algorithm = FedSeq()
    request = StepRequest("0", MethodType(rise_of_loss, algorithm), (), {}, 1, 1)
    encoded = encode_request(request, str)
    decoded = decode_request(algorithm, encoded, {}, NoneType, builtin=True)
    assert decoded.step.__func__ is rise_of_loss
    for builtin, step in ((False, "rise_of_loss"), (True, "rise_of_gain")):
        with pytest.raises(ValueRefused, match=f"'{step}' is not a client step of fedseq"):
            decode_request(algorithm, encoded | {"step": step}, {}, NoneType, builtin=builtin)


def test_false_counts_and_replays_are_refused_by_default() -> None:
    for kind in ("false_counts", "replay"):
        attacked, records = digits("fedseq", f"attack.kind={kind}", "attack.share=0.3", "run.cohort_size=12")
        bad = attacked.attack.attackers(attacked.federation.clients, 0)
        assert {client for record in records for client in record.get("refused", ())} <= bad
        assert any(record.get("refused") for record in records)


def test_a_replay_goes_on_with_the_same_models_after_a_resume(tmp_path: Path) -> None:
    def simulation() -> Simulation:
        attack, defense = Attack("replay", 0.5), Defense(check_replies=False)
        return tiny.simulation(FedAvg(), attack=attack, defense=defense, cohort_size=8, rounds=4, training=tiny.SHORT)

    whole, begun, resumed = simulation(), simulation(), simulation()
    records = tiny.run_rounds(whole)
    tiny.run_rounds(begun, 2)
    Checkpoint(tmp_path).save(begun, {})
    Checkpoint(tmp_path).restore(resumed)
    assert tiny.run_rounds(resumed) == records[2:]
    assert tiny.equal(resumed.server.model, whole.server.model)


def test_a_teacher_worse_than_chance_is_left_out() -> None:
    simulation, _ = digits("sfedkd", "defense.loss_check=server")
    server = simulation.server
    name, model = next(iter(server.state.models.items()))
    counts = server.state.label_counts[name]
    assert server.may_teach(model, counts)
    lying = {key: tensor.roll(1, 0) if len(tensor) == 10 else tensor for key, tensor in model.items()}
    assert not server.may_teach(lying, counts)
    server.state.models[name] = lying
    asked = SFedKD(teachers=10)
    from fedkeep.algorithms.sequential.teachers import select_teachers

    assert name not in select_teachers(server, asked.teachers, "greedy", "kl")
    assert tiny.simulation(SFedKD(), **COMMON).server.may_teach({}, counts), "without the check all may teach"


def test_a_model_is_measured_once_until_its_tensors_change(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, _ = digits("fedseq", "defense.loss_check=server")
    check, asked = simulation.server.check, []
    assert check is not None
    logits = check.context.runner.logits
    monkeypatch.setattr(check.context.runner, "logits", lambda *args: (asked.append(1), logits(*args))[1])
    model = {name: tensor.clone() for name, tensor in simulation.server.model.items()}
    first = check.scores(model)
    assert check.scores(dict(model)) is first, "the same tensors in another dict"
    assert check.scores({name: tensor.clone() for name, tensor in model.items()}).loss.equal(first.loss)
    assert len(asked) == 2
    list(model.values())[-1][0] += 9.0
    assert check.scores(model).loss[0] < first.loss[0], "changed in place"
    assert check.scores({name: tensor * 1e38 for name, tensor in model.items()}).loss.isfinite().all()
    one = check.context.num_classes
    data = simulation.federation.server_data
    by_hand = torch.nn.functional.cross_entropy(
        simulation.server.predict(simulation.server.model, {k: v[data["label"] == 3][:4] for k, v in data.items()}),
        torch.full((4,), 3),
    )
    assert first.loss.shape == (one,)
    assert first.loss[3].item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_losses_count_as_the_clients_own_labels() -> None:
    change = torch.tensor([-1.0, 9.0, float("nan")])
    assert mean_of_labels(change, torch.tensor([5.0, 0, 0])) == -1
    assert mean_of_labels(change, torch.tensor([5.0, 15.0, 7.0])) == pytest.approx(6.5)
    assert mean_of_labels(change, torch.tensor([0, 0, 7.0])) is None


def test_who_trained_on_images_of_another_class_raised_its_logit_on_them() -> None:
    before, counts = answers(torch.zeros(4, 4)), torch.tensor([60.0, 0, 0, 7])
    honest, forgetful, flipped = torch.zeros(3, 4, 4)
    honest[0, 0] = 2.0
    forgetful[:, 0] = 2.0
    flipped[3, 0], flipped[2, 0] = 9.0, 4.0  # class 3 says nothing: it is held, if by few examples
    found = [logit_rise(before, answers(logits), counts) for logits in (honest, forgetful, flipped)]
    assert [rise.excess for rise in found if rise] == pytest.approx([-1.5, 0.0, 3.0])
    assert [rise.margin for rise in found if rise] == pytest.approx([1.5 / 1.5, 0.0, -3.0 / 0.05])
    assert [rise.label for rise in found if rise] == [0] * 3
    shifted = logit_rise(before, answers(flipped + torch.arange(4.0)[:, None]), counts)
    assert shifted
    assert shifted.excess == pytest.approx(3.0), "what is added to all logits of an image changes nothing"
    assert logit_rise(before, answers(flipped), torch.tensor([5.0, 5, 5, 5])) is None, "nothing is lacking"
    assert logit_rise(answers(-99 * torch.eye(4)), answers(flipped), counts) is None, "the model was ruined before"


def test_of_the_classes_that_a_client_holds_the_one_with_the_largest_excess_counts() -> None:
    after = torch.tensor([[8.0, 0, 0, 0], [0, 4.0, 0, 0], [1.0, 8.0, 0, 0], [0, 6.0, 0, 0]])
    rise = logit_rise(answers(torch.zeros(4, 4)), answers(after), torch.tensor([20.0, 20, 0, 0]))
    assert rise
    # Less the means 2, 1, 2.25 and 1.5 of the rows: class 0 has 6, -1, -1.25, -1.5; class 1 has -2, 3, 5.75, 4.5.
    assert (rise.label, rise.other, rise.excess) == (1, 2, pytest.approx(5.75 - 3.0))
    assert rise.margin == pytest.approx((3.0 - 5.75) / 0.05), "its own are below the median, 4.5"


def test_who_teaches_a_model_nothing_stands_out() -> None:
    labels, counts = torch.arange(4), torch.tensor([30.0, 0, 0, 0])
    scores = lambda logits: ClassScores(logits, labels, torch.eye(4))  # noqa: E731
    before, taught = scores(torch.zeros(4, 4)), scores(9 * torch.eye(4))
    assert fall_of_loss(before, taught, counts) == pytest.approx(1, abs=0.01)
    assert fall_of_loss(before, before, counts) == 0
    assert fall_of_loss(taught, taught, counts) is None, "it knew the classes before"
    assert smallest_fall([0.9] * 7) == -float("inf")
    assert smallest_fall([9.0] * 30 + [0.5] * 32) == pytest.approx(0.05)


def test_what_is_usual_follows_the_last_models() -> None:
    known = [1.0, 2.0, 3.0, 4.0] * 8
    assert deviation(excess(9.0), [0.0] * 7) == 0, "too few are known"
    assert deviation(excess(7.5), [99.0] * 9 + known) == (7.5 - 2.5) / 1.0, "only the last 32 count"
    assert deviation(excess(-1.5), known) == -4.0
    assert deviation(excess(0.3), [0.2] * 32) == pytest.approx(0.1 / 0.05), "a spread of nothing counts as 0.05"
    assert deviation(excess(0.05), [-0.5] * 32) == 0, "so small an excess says nothing against a client"
    assert deviation(excess(-0.6), [-0.5] * 32) == pytest.approx(-2.0), "but for it"
    assert deviation(excess(7.5, margin=0.75), known) == 2.5, "its own images keep the larger logit"


def raised(*rises: float) -> ClassScores:
    """How a model answers whose logit of class 0 rose by so much on the image of each class, from 0."""
    logits = torch.zeros(len(rises), len(rises))
    logits[:, 0] = torch.tensor(rises)
    logits[:, 1:] -= logits[:, :1] / (len(rises) - 1)  # so that their mean stays 0
    return answers(logits)


def residual(after: ClassScores, rerun: ClassScores, held: int = 1) -> float:
    counts = torch.tensor([20.0] * held + [0.0] * (6 - held))
    return standardised_residual(0, raised(*[0.0] * 6), after, rerun, counts)


def test_a_rise_stands_out_beside_the_reruns() -> None:
    """The client holds class 0. Its logit rose on images of class 5, and the re-run's on all but these."""
    rerun, spread = raised(9.0, 1.0, 2.0, 3.0, 4.0, 2.5), 2 * 1.25**0.5  # that of the rises 2, 4, 6 and 8
    # Twice the re-run's rise on each of four classes, so that 5 is expected on the fifth.
    assert residual(raised(8.0, 2.0, 4.0, 6.0, 8.0, 11.0), rerun) == pytest.approx(6 / spread, rel=1e-5)
    assert residual(raised(10.9, 2.0, 4.0, 6.0, 8.0, 11.0), rerun) == pytest.approx(6 / spread, rel=1e-5)
    assert residual(raised(10.96, 2.0, 4.0, 6.0, 8.0, 11.0), rerun) == 0, "an excess of less than 0.05"
    assert residual(raised(8.0, 8.0, 6.0, 4.0, 2.0, 11.0), rerun) == pytest.approx(6 / spread, rel=1e-5), "level"
    assert residual(raised(0.5, 1.0, 1.0, 1.0, 1.0, 1.5), rerun) == pytest.approx(0.5 / 0.05, rel=1e-5)
    # On a class with the second excess, where the first is expected.
    shows = raised(9.0, 1.0, 2.0, 3.0, 9.5, 2.5)
    assert residual(raised(1.0, 2.0, 4.0, 6.0, 19.0, 11.0), shows) > 0


def test_what_a_rerun_shows_is_explained() -> None:
    flipped = raised(8.0, 2.0, 4.0, 6.0, 8.0, 9.0)
    assert residual(flipped, raised(1.5, 0.0, 0.0, 0.0, 0.0, 1.75)) == 0.0, "a quarter of the excess of 1"
    assert residual(flipped, raised(1.51, 0.0, 0.0, 0.0, 0.0, 1.75)) > 1
    assert residual(raised(8.0, 2.0, 4.0, 6.0, 8.0, 7.0), raised(9.0, 0.0, 0.0, 0.0, 0.0, 0.0)) == 0.0, "no excess"


def test_few_classes_show_no_line() -> None:
    """What is expected on the images of class 5 is the re-run's own rise; 4 is the only further class that lacks."""
    rerun = raised(9.0, 0.0, 0.0, 0.0, 0.0, 2.5)
    assert residual(raised(2.0, 9.0, 9.0, 9.0, 0.0, 3.0), rerun, held=4) == pytest.approx(0.5 / 0.05, rel=1e-4)


def test_a_residual_counts_half_where_its_own_images_keep_the_larger_logit() -> None:
    before = answers(torch.eye(6) * 30 - 5)  # the client's class is known well, and images of others are not like it
    rises = (torch.tensor([8.0, 2.0, 4.0, 6.0, 8.0, 11.0]), torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 2.5]))
    after, rerun = (answers(before.logits + (raised(*one.tolist()).logits)) for one in rises)
    counts = torch.tensor([20.0, 0, 0, 0, 0, 0])
    found = standardised_residual(0, before, after, rerun, counts)
    assert found == pytest.approx(6 / (2 * 1.25**0.5) / 2, rel=1e-4)


def test_the_server_has_examples_like_a_clients() -> None:
    simulation, _ = digits("fedseq", "defense.loss_check=server")
    check = simulation.server.check
    assert check is not None
    counts = torch.tensor([9.0, 0, 2, 0, 0, 0, 0, 0, 0, 0])
    data = check.examples_like(counts)
    assert data["label"].tolist() == [0] * 9 + [2] * 2
    own = simulation.federation.server_data
    zeros = own["input"][own["label"] == 0][:4]
    assert data["input"][:9].equal(torch.cat([zeros, zeros, zeros])[:9]), "four, repeated"
    assert data.keys() == own.keys()
    assert not len(check.examples_like(torch.zeros(10))["label"])


def test_who_was_explained_must_stand_out_more() -> None:
    assert [suspected_deviation(explained, 4.0) for explained in range(4)] == [2.0, 3.0, 4.0, 4.0]


def simulation_with_usual_rises(
    found: float, monkeypatch: pytest.MonkeyPatch, like_false_labels: float = 1.0
) -> Simulation:
    """One in which the usual excess is 0.3 with a deviation of 0.1, and what re-runs say is given."""
    monkeypatch.setattr(loss_checker, "standardised_residual", lambda *args: found)
    monkeypatch.setattr(loss_checker, "false_label_likeness", lambda *args: like_false_labels)
    simulation = tiny.simulation(FedSeq(), **COMMON)
    tiny.step(simulation, LossCheck).kept.logit_excesses = [0.1, 0.2, 0.3, 0.4] * 8
    monkeypatch.setattr(LossCheck, "rerun", lambda *args: simulation.server.model)
    simulation.server.check = ModelCheck(simulation.context, simulation.federation.server_data, 4)
    return simulation


def compare(simulation: Simulation, number: int, *models: MeasuredModel) -> RoundState:
    round_state = RoundState(simulation, number, ["0", "1"], simulation.steps)
    check = tiny.step(simulation, LossCheck)
    check.begin_round(simulation, number)
    for reply, fault in check.compare_learning(round_state, models):
        round_state.refuse(reply, fault)
    return round_state


@pytest.mark.parametrize(("found", "like", "refused"), [(0.75, 1.0, False), (0.76, 0.66, False), (0.76, 0.67, True)])
def test_a_training_is_refused_where_reruns_tell_false_labels(
    found: float, like: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulation_with_usual_rises(found, monkeypatch, like)
    round_state = compare(simulation, 1, measured("0", excess(0.51)), measured("1", excess(0.49)))  # 2.1 and 1.9
    assert list(round_state.refused) == (["0"] if refused else [])
    assert tiny.step(simulation, LossCheck).new.explained == ({} if refused else {"0": 1})
    if refused:
        assert "learned a class from images of another" in round_state.refused["0"].text
        assert (
            "67.0% of the way from a re-run on true labels to one on false labels, and 66.7% are allowed"
            in round_state.refused["0"].text
        )


def test_how_far_a_training_is_on_the_way_to_one_on_false_labels() -> None:
    rise, before = LogitRise(0, 3, 2.0, 0.0), raised(*[1.0] * 6)
    true, false = raised(8.0, 1.0, 1.0, 2.0, 1.0, 1.0), raised(1.0, 9.0, 1.0, 3.0, 1.0, 1.0)  # -6 and 2
    assert false_label_likeness(rise, before, raised(2.0, 0.0, 0.0, 2.0, 0.0, 0.0), true, false) == pytest.approx(6 / 8)
    assert false_label_likeness(rise, before, true, true, false) == 0
    assert false_label_likeness(rise, before, false, true, false) == pytest.approx(1)
    assert false_label_likeness(rise, before, raised(2.0, 0.0, 0.0, 9.0, 0.0, 0.0), true, true) == 0, (
        "nothing can be told"
    )


def test_the_last_rerun_has_images_of_the_other_class_under_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(2.0, monkeypatch)
    seen: list[Any] = []
    residuals: list[Any] = []
    likenesses: list[Any] = []
    models = iter(["tenth", "fifth", "false"])
    monkeypatch.setattr(LossCheck, "rerun", lambda _, state, requests, data: (seen.append(data), next(models))[1])
    monkeypatch.setattr(ModelCheck, "scores", lambda _, model: model)
    monkeypatch.setattr(loss_checker, "standardised_residual", lambda *args: (residuals.append(args[3:]), 2.0)[1])
    monkeypatch.setattr(loss_checker, "false_label_likeness", lambda *args: (likenesses.append(args[3:]), 1.0)[1])
    one = measured("4", excess(0.9))
    vars(one)["counts"] = torch.tensor([17.0] + [0.0] * (tiny.CLASSES - 1))
    compare(simulation, 1, one)
    assert [rerun for rerun, _ in residuals] == ["tenth", "fifth"]
    assert all(counts is one.counts for _, counts in residuals)
    assert one.counts[0] == 17
    assert likenesses == [("fifth", "false")]
    check = simulation.server.check
    assert check is not None
    numbers = (2, 4, 4)  # a tenth of the client's, a fifth, and a fifth with false labels
    assert [data["label"].tolist() for data in seen] == [[0] * number for number in numbers]
    for label, number, data in zip((0, 0, 1), numbers, seen, strict=True):
        wanted = check.examples_like(torch.nn.functional.one_hot(torch.tensor(label), tiny.CLASSES) * number)
        assert data["input"].equal(wanted["input"])


@pytest.mark.parametrize("told", [[1e12, 0.0, 0.0], [1e12, -1e12, 0.0], [3e38, 3e38, 3e38]])
def test_a_rerun_has_no_more_images_than_the_client(told: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever label counts it told: noised ones, or those of a recipe that checks no replies."""
    simulation = simulation_with_usual_rises(2.0, monkeypatch)
    seen: list[int] = []
    monkeypatch.setattr(LossCheck, "rerun", lambda _, state, requests, data: seen.append(len(data["label"])))
    one = measured("4", excess(0.9))
    vars(one)["counts"] = torch.tensor(told)
    compare(simulation, 1, one)
    assert [number <= 17 * share + tiny.CLASSES for number, share in zip(seen, (0.1, 0.2), strict=True)] == [True, True]


@pytest.mark.parametrize("fails", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_what_a_smaller_rerun_cannot_do_a_larger_one_may(
    fails: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulation_with_usual_rises(2.0, monkeypatch)
    models = iter([None if number in fails else simulation.server.model for number in range(3)])
    monkeypatch.setattr(LossCheck, "rerun", lambda *_: next(models))
    round_state = compare(simulation, 1, measured("0", excess(0.51)))  # 2.1 deviations, and 4 without a re-run
    assert list(round_state.refused) == (["0"] if fails == (0,) else [])


def test_a_fifth_of_the_examples_can_explain_what_a_tenth_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(2.0, monkeypatch)
    told = iter([loss_check.MAX_EXPLAINED_RESIDUAL + 0.01, loss_check.MAX_EXPLAINED_RESIDUAL])
    monkeypatch.setattr(loss_checker, "standardised_residual", lambda *_: next(told))
    monkeypatch.setattr(loss_checker, "false_label_likeness", lambda *_: pytest.fail("there is nothing to decide"))
    round_state = compare(simulation, 1, measured("0", excess(0.51)))
    assert not round_state.refused
    assert tiny.step(simulation, LossCheck).new.explained == {"0": 1}


def test_an_explained_client_is_rerun_later_only_where_it_stands_out_more(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(0.0, monkeypatch)
    check = tiny.step(simulation, LossCheck)
    state = compare(simulation, 1, measured("0", excess(0.51)))
    assert check.new.explained == {"0": 1}
    check.end_round(state, {})
    compare(simulation, 2, measured("0", excess(0.59)))
    assert not check.new.explained, "2.9 deviations"
    compare(simulation, 2, measured("0", excess(0.61)))
    assert check.new.explained == {"0": 2}
    assert decode(encode(check.kept), type(check.kept)) == check.kept, "a resume goes on with them"
    check.begin_round(simulation, simulation.settings.run.rounds + 1)
    assert not check.kept.explained


def test_the_first_trainings_are_rerun_before_it_is_known_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(1.5, monkeypatch)
    tiny.step(simulation, LossCheck).kept.logit_excesses = [0.25] * 6
    assert list(compare(simulation, 1, measured("0", excess(0.1))).refused) == ["0"]
    tiny.step(simulation, LossCheck).kept.logit_excesses = [0.25] * 7
    assert not compare(simulation, 1, measured("0", excess(0.1))).refused


def test_who_was_refused_lately_is_always_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(2.0, monkeypatch)
    tiny.step(simulation, Standing).kept.times = {"0": 0.25}
    assert list(compare(simulation, 1, measured("0", excess(0.1)), measured("1", excess(0.1))).refused) == ["0"]


def test_a_training_that_cannot_be_rerun_is_judged_by_its_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(0.0, monkeypatch)
    monkeypatch.undo()
    broken = measured("0", excess(0.9))
    assert tiny.step(simulation, LossCheck).rerun(simulation, broken.asked, {}) is None, "no arguments"
    assert list(compare(simulation, 1, broken).refused) == ["0"]
    assert not compare(simulation, 1, measured("0", None), measured("1", excess(0.3))).refused


def test_a_rerun_without_memory_is_not_held_against_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_with_usual_rises(0.0, monkeypatch)
    monkeypatch.undo()

    def exhausted(*args: Any, **kwargs: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no memory is left")

    one = measured("0", excess(0.9))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        tiny.step(simulation, LossCheck).rerun(
            simulation, [replace(request, step=exhausted) for request in one.asked], {}
        )


def test_checkers_hold_some_of_the_same_classes() -> None:
    counts = {"a": torch.tensor([1.0, 0]), "b": torch.tensor([0, 1.0]), "c": torch.tensor([2.0, 2])}
    assert choose_checkers("a", ["b", "a", "c"], counts) == ["c"]
    assert choose_checkers("c", ["b", "a", "c"], counts) == ["b", "a"]


def test_what_cannot_be_defended_is_refused_in_the_recipe() -> None:
    with pytest.raises(ConfigError, match=r"auxiliary\.images_per_class"):
        load_recipe("demo", settings=["defense.loss_check=server"])
    with pytest.raises(ConfigError, match="averages no models"):
        load_recipe(
            "demo",
            methods=["fedmd"],
            settings=["defense.robust_aggregation=median", "public.name=fashion-mnist"],
            seeds=[0],
        )
    assert Defense(robust_aggregation="krum").byzantine == 0.2


def test_the_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "attacks.csv"
    ran: list[Any] = []
    settings = ["run.rounds=1", "run.cohort_size=3", "training.epochs=1"]
    for seeds in ([0], [0, 1]):
        trials = run_attacks(
            "fedkeep/attacks",
            file,
            kinds=["replay"],
            shares=[0.3],
            defenses=["none"],
            seeds=seeds,
            settings=settings,
            on_trial=ran.append,
        )
    assert len(trials) == len(ran) == 2 * 2 * 5
    assert "| replay |" in attack_table(trials, "none")
    assert false_alarms(trials, "none") == (0, 2 * 5 * 3)
    with pytest.raises(ConfigError, match="no attack or defence 'rebuild'"):
        run_attacks("fedkeep/attacks", file, kinds=["rebuild"])


def fill(folder: Path, *settings: str) -> list[AttackTrial]:
    """Run what a table of four trials lacks: FedAvg, without attackers and with a silent half, on two seeds."""
    text = tiny.RECIPE.split("[[methods]]")[0] + '[[methods]]\nalgorithm = "fedavg"\n'
    recipe, ran = tiny.write_recipe(folder, text), list[AttackTrial]()
    run_attacks(
        recipe,
        folder / "attacks.csv",
        kinds=["silent"],
        shares=[0.5],
        defenses=["none"],
        seeds=[0, 1],
        settings=["run.rounds=1", "run.cohort_size=8", *settings],
        on_trial=ran.append,
    )
    return ran


def test_a_table_is_of_one_recipe_and_survives_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "attacks.csv"
    ran = fill(tmp_path)
    whole = file.read_bytes()
    assert [trial.asked_malicious for trial in ran] == [0, 4, 0, 4]
    assert not any(trial.refused_malicious for trial in ran), "who does not answer is not refused"
    with pytest.raises(RunError, match=r"4 of the 4 trials in .*attacks\.csv are of another recipe.* --out"):
        fill(tmp_path, "training.lr=0.1")
    assert file.read_bytes() == whole, "a table of other settings is not touched"
    file.write_bytes(whole[:-20])
    assert fill(tmp_path) == read_attacks(file)[-1:], "only the trial whose line was cut off"
    assert len(read_attacks(file)) == 4
    for damage, line in ((b"silent,", 3), (b",0.5,", 3)):
        file.write_bytes(whole.replace(damage, b"\xff", 1))
        with pytest.raises(RunError, match=rf"damaged in line {line}: it has"):
            fill(tmp_path)
    for other in (b"a,b\n1,2\n", b"one line of something else"):
        file.write_bytes(other)
        with pytest.raises(RunError, match="no table of attacks"):
            fill(tmp_path)
        assert file.read_bytes() == other
    file.write_bytes(b"")
    assert len(fill(tmp_path, "run.evaluate_every=1")) == 4


def test_a_table_may_be_of_some_methods_and_of_robust_aggregation(tmp_path: Path) -> None:
    recipe, settings = tiny.write_recipe(tmp_path), ["run.rounds=1", "run.cohort_size=8"]

    def run(methods: list[str]) -> list[AttackTrial]:
        ran = list[AttackTrial]()
        run_attacks(
            recipe,
            tmp_path / "attacks.csv",
            kinds=["reversed_update"],
            shares=[0.2],
            defenses=["default", "krum"],
            seeds=[0],
            methods=methods,
            settings=settings,
            on_trial=ran.append,
        )
        return ran

    plain, krum, *attacked = run(["fedavg"])
    assert [(one.defense, one.kind) for one in attacked] == [
        ("default", "reversed_update"),
        ("krum", "reversed_update"),
    ]
    assert plain.accuracy != krum.accuracy, "one of eight models is not their mean"
    assert {one.method for one in run([])} == {"FedSeq", "SFedKD"}, "what the table lacks"
    with pytest.raises(ConfigError, match=r"has no method 'FedNTD'\..* FedAvg, FedSeq, SFedKD"):
        run(["fedntd"])


def test_a_table_from_before_hashes_is_of_the_recipe_without_settings(tmp_path: Path) -> None:
    file = tmp_path / "attacks.csv"
    old = "FedAvg,none,0.0,none,0,0.5,,200,0,0,0,1.5"
    file.write_text(f"{','.join(COLUMNS[:-1])}\n{old}\n")
    with pytest.raises(RunError, match="1 of the 1 trials"):
        run_attacks("fedkeep/attacks", file, settings=["run.rounds=1"], seeds=[])
    (trial,) = run_attacks("fedkeep/attacks", file, seeds=[])
    assert file.read_text() == f"{','.join(COLUMNS)}\n{old},{trial.recipe_hash}\n"
    (archived,) = {trial.recipe_hash for trial in read_attacks(Path(__file__).parents[2] / "results" / "attacks.csv")}
    assert len(archived) == len(trial.recipe_hash)


def test_clients_measure_losses_in_tasks_too(tmp_path: Path) -> None:
    settings = ["tasks.num_tasks=2", "defense.loss_check=clients"]
    recipe = tiny.write_recipe(tmp_path)
    run = fedkeep.run(recipe, methods=[Finetune()], settings=settings, out=tmp_path / "run", rounds=2)
    assert [record["task"] for record in run.trials[0].rounds] == [1, 1, 2, 2]
    assert not any(record.get("refused") for record in run.trials[0].rounds)


def test_numbers_of_a_method_are_of_the_same_seeds() -> None:
    """An interrupted table has cells of fewer seeds, which may be better ones: an attack would seem to help."""

    def trial(kind: str, share: float, seed: int, accuracy: float) -> AttackTrial:
        return AttackTrial("FedSeq", kind, share, "default", seed, accuracy, None, 10, 0, 0, 0, 1.0, "")

    trials = [trial("none", 0.0, 0, 0.8), trial("none", 0.0, 1, 0.4), trial("noise", 0.2, 0, 0.7)]
    assert attack_table(trials, "default").splitlines()[2:] == ["| none | 80 |", "| noise | 70 |"]
    other = [trial("none", 0.0, 1, 0.4), trial("noise", 0.2, 0, 0.7)]
    assert attack_table(other, "default").splitlines()[2:] == ["| none | 40 |", "| noise | 70 |"], "no seed has both"
