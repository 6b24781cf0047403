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

from fedkeep.algorithms.incremental.fedlwf import FedLwF
from fedkeep.algorithms.incremental.fedskf import FedSKF
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.data import Federation
from fedkeep.errors import ConfigError, RunError, ValueRefused
from fedkeep.experiment.build import build_federation, check_federation
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import BUILTIN_STEPS, send_label_counts, unwrap_step
from fedkeep.interface.codec import decode, encode
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Weights
from fedkeep.rounds.messages import StepRequest, decode_request, encode_request
from fedkeep.rounds.reply_step import Reply
from fedkeep.rounds.round import RoundState
from fedkeep.rounds.run_settings import Attack, Defense
from fedkeep.training.evaluation import mean_of_labels
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import Simulation
from fedkeep.trust.attacks import add_trigger, classes_lacking, exaggerate_forgetting, poison
from fedkeep.trust.loss_check import LossCheck
from fedkeep.trust.updates import Updates

SETTINGS = ["auxiliary.images_per_class=4", "run.rounds=4", "run.cohort_size=6", "training.epochs=3"]
COMMON = {"cohort_size": len(tiny.SIZES), "rounds": 2}


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
    for share in (0.0, 0.01):
        changes = [f"attack.share={share}", "attack.kind=replay"]
        recipe = load_recipe("demo", methods=["fedseq"], seeds=[0], settings=changes)
        federation = build_federation(recipe, 0)
        if share:
            with pytest.raises(ConfigError, match=r"attack.share=0.01 of [0-9]+ clients is less than one. Raise it"):
                check_federation(recipe, federation)
        else:
            check_federation(recipe, federation)


def test_a_backdoor_needs_images() -> None:
    honest = tiny.federation()
    train = {**honest.dataset.train, "input": torch.rand(len(honest.dataset.train["label"]), 4)}
    federation = replace(honest, dataset=replace(honest.dataset, train=train, test=train, mean=(), std=()))
    with pytest.raises(ConfigError, match="backdoor puts a bright square into images, and tiny has none"):
        poison(federation, Attack("backdoor", 0.5), 0)


def test_a_replay_begins_anew_with_each_task() -> None:
    """The first task's model has too few outputs for the second, and would be refused whatever is checked."""
    simulation = tiny.simulation_with_tasks(
        FedLwF(), attack=Attack("replay", 0.5), defense=Defense(check_replies=False)
    )
    records = tiny.run_rounds(simulation)
    assert len(records) > 2
    assert not any(record["lost"] for record in records)


def test_attacks_on_examples_change_labels_and_corners() -> None:
    honest = tiny.simulation(FedSeq(), **COMMON)
    flipped = tiny.simulation(FedSeq(), attack=Attack("label_flip", 0.5), **COMMON)
    backdoor = tiny.simulation(FedSeq(), attack=Attack("backdoor", 0.5), **COMMON)
    bad = flipped.settings.attack.attackers(honest.federation.clients, 0)
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


@pytest.mark.parametrize("kind", ["label_flip", "backdoor", "exaggerated_forgetting"])
def test_attacks_that_need_examples_are_refused_where_the_examples_are_at_sites(kind: Any) -> None:
    """There they did nothing, and a trial of a defence would have been an honest run."""
    views = pytest.importorskip("fedkeep.flower.views")
    site = views.client_view(tiny.federation(), "0", "hospital")
    with pytest.raises(ConfigError, match=f"attack.kind={kind} needs .* at its sites"):
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


@pytest.mark.parametrize("kind", ["scaled_update", "sign_flip", "reversed_update", "lying_teacher"])
def test_the_server_finds_attackers_and_no_one_else(kind: str) -> None:
    honest, _ = digits("fedseq")
    checked, records = digits("fedseq", "defense.loss_check=server")
    assert not any(record["lost"] for record in records)
    assert tiny.equal(honest.server.model, checked.server.model), "a check that refuses nobody changes nothing"
    attacked, records = digits("fedseq", "defense.loss_check=server", f"attack.kind={kind}", "attack.share=0.3")
    bad = attacked.settings.attack.attackers(attacked.federation.clients, 0)
    refused = {client for record in records for client in record.get("refused", ())}
    assert refused
    assert refused <= bad


def test_the_step_of_the_loss_check_is_known_where_losses_are_checked() -> None:
    """A method does not have it, so a worker process and a site look it up by name."""
    algorithm = FedSeq()
    request = StepRequest("0", MethodType(send_label_counts, algorithm), (), {}, 1, 1)
    encoded = encode_request(request, str)
    decoded = decode_request(algorithm, encoded, {}, NoneType, builtin=BUILTIN_STEPS)
    assert decoded.step.__func__ is send_label_counts
    for builtin, step in (({}, "send_label_counts"), (BUILTIN_STEPS, "send_more_counts")):
        with pytest.raises(ValueRefused, match=f"'{step}' is not a client step of fedseq"):
            decode_request(algorithm, encoded | {"step": step}, {}, NoneType, builtin=builtin)


def test_false_counts_and_replays_are_refused_by_default() -> None:
    for kind in ("false_counts", "replay"):
        attacked, records = digits("fedseq", f"attack.kind={kind}", "attack.share=0.3", "run.cohort_size=12")
        bad = attacked.settings.attack.attackers(attacked.federation.clients, 0)
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


def checked(counts: list[float], slack: float = 0.15, **settings: Any) -> list[str]:
    """Let the server check a model that answers class 0 whatever it sees; return what it says against it."""
    defense = Defense(loss_check="server", loss_slack=slack)
    simulation = tiny.simulation(FedSeq(), defense=defense, **COMMON, **settings)
    check, model = tiny.step(simulation, LossCheck), simulation.server.model
    check.kept.by_client = {"4": counts}
    round_state = RoundState(simulation, 1, ["4", "0"], simulation.steps)
    changed = {**model, "classifier.bias": model["classifier.bias"] + 3.0 * torch.eye(tiny.CLASSES)[0]}
    step = MethodType(unwrap_step(FedSeq.train), simulation.algorithm)
    reply = Reply(StepRequest("4", step, (model,), {}, 1, 1), Fit(changed, 1, 1, 0.5))
    tiny.step(simulation, Updates).receive(round_state, reply)
    check.begin_round(simulation, 1)
    return [fault.text for _, fault in check.screen(round_state, [reply])]


@pytest.mark.parametrize("counts", [[0.0, 17.0, 0.0], [-1e12, 1e12, 0.0]])
def test_a_model_whose_loss_on_its_own_classes_rose_is_refused(counts: list[float]) -> None:
    assert "whose loss on the classes that it holds rose by" in checked(counts)[0]
    assert not checked(counts, slack=9.0)
    assert not checked([counts[1], 0.0, 0.0]), "what it forgets of other classes says nothing"


def test_who_holds_nothing_changes_nothing() -> None:
    assert "changed, though it says that it holds no examples" in checked([0.0, 0.0, 0.0])[0]
    noised = Privacy(counts_epsilon=0.1)
    assert not checked([0.0, 0.0, 0.0], privacy=noised), "noise may have made zeros of its counts"


def test_label_counts_are_kept_within_a_task() -> None:
    simulation = tiny.simulation(FedSeq(), defense=Defense(loss_check="server"), **COMMON)
    tiny.run_rounds(simulation, 1)
    check = tiny.step(simulation, LossCheck)
    assert check.kept.by_client.keys() == set(simulation.sample_cohort(1))
    assert decode(encode(check.kept), type(check.kept)) == check.kept, "a resume goes on with them"
    check.begin_round(simulation, simulation.settings.run.rounds + 1)
    assert not check.kept.by_client


def test_exaggerated_forgetting_lowers_the_bias_of_classes_that_the_client_lacks() -> None:
    """The first reply of a cohort that is asked at once is that of an honest run but for this."""
    settings = ["run.rounds=1", "attack.kind=exaggerated_forgetting", "attack.share=0.5", "attack.strength=2.5"]
    recipe = load_recipe("fedkeep/attacks", methods=["fedavg"], settings=[*SETTINGS, *settings], seeds=[0])
    models: list[dict[str, Weights]] = []
    for attack in (Attack(), recipe.attack):
        simulation = Experiment(replace(recipe, attack=attack)).simulation(recipe.methods[0], 0)
        cohort = simulation.sample_cohort(1)
        models.append({})

        def keep(_: Any, round: Any, reply: Reply, known: dict[str, Weights] = models[-1]) -> None:
            if isinstance(reply.value, Fit):
                known[reply.client] = reply.value.model

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Updates, "receive", keep)
            simulation.run_round()
    bad = simulation.settings.attack.attackers(simulation.federation.clients, 0)
    for client in cohort:
        honest, sent = models[0][client], models[1][client]
        lacking = torch.bincount(simulation.federation.data(client)["label"], minlength=10) == 0
        lowered = honest["classifier.bias"] - 2.5 * lacking * (client in bad)
        assert sent["classifier.bias"].equal(lowered)
        assert all(sent[name].equal(tensor) for name, tensor in honest.items() if name != "classifier.bias")
    assert 0 < len(bad & set(cohort)) < len(cohort)


def test_exaggerated_forgetting_needs_a_bias() -> None:
    with pytest.raises(ConfigError, match=r"lowers classifier\.bias, which the network lacks"):
        exaggerate_forgetting({"weight": torch.zeros(3)}, torch.ones(3), 1.0)


def test_all_rows_of_a_lacking_class_are_lowered() -> None:
    """PASS has four for each class."""
    federation = tiny.federation()
    client = federation.clients[0]
    lacking = torch.bincount(federation.data(client)["label"], minlength=tiny.CLASSES) == 0
    assert classes_lacking(federation, client, 4).tolist() == [one for one in lacking for _ in range(4)]


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


def test_numbers_of_a_method_are_of_the_same_seeds() -> None:
    """An interrupted table has cells of fewer seeds, which may be better ones: an attack would seem to help."""

    def trial(kind: str, share: float, seed: int, accuracy: float) -> AttackTrial:
        return AttackTrial("FedSeq", kind, share, "default", seed, accuracy, None, 10, 0, 0, 0, 1.0, "")

    trials = [trial("none", 0.0, 0, 0.8), trial("none", 0.0, 1, 0.4), trial("noise", 0.2, 0, 0.7)]
    assert attack_table(trials, "default").splitlines()[2:] == ["| none | 80 |", "| noise | 70 |"]
    other = [trial("none", 0.0, 1, 0.4), trial("noise", 0.2, 0, 0.7)]
    assert attack_table(other, "default").splitlines()[2:] == ["| none | 40 |", "| noise | 70 |"], "no seed has both"
