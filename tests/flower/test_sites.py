"""Server and sites together, without Flower between them: same results, losses, restarts, and who is let in."""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from fake_device import DEVICE, fake_device
from local_transport import LocalTransport, Tamper, node_configs
from safetensors.torch import save_file
from trial import SETTINGS, Killed, config, embedded, embedded_once, killing, model, records

from fedkeep import tracking
from fedkeep._utils.digests import (
    DamagedFile,
    Identity,
    read_json,
    read_manifest,
    read_toml,
    write_json,
    write_manifest,
    write_toml,
)
from fedkeep._utils.files import quoted_name
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.errors import FedKeepError, RunError
from fedkeep.experiment.build import check_device, load_data
from fedkeep.experiment.provenance import trial_name
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.flower import executor
from fedkeep.flower import transport as transports
from fedkeep.flower.executor import FlowerExecutor
from fedkeep.flower.server import serve
from fedkeep.flower.state_store import StateStore, stored_secret
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.interface.privacy import sample_rate_of, spent_ever
from fedkeep.metrics import dp_sgd_epsilon
from fedkeep.rounds import reply_store
from fedkeep.rounds.messages import Fault, no_reply
from fedkeep.trials.trial import TrialBusy

METHODS = (
    "fedavg",
    "sfedkd",
    "scaffold",
    *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedcad", "fedadkd", "moon")),
)
KILLED = [("sfedkd", 6), ("scaffold", 0), ("moon", 9)]
"""Methods with models of several teachers, with state at the server and at clients, and at clients only; killed after
so many messages. All other pairs are slow tests.
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def cohorts(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The cohorts of the recipe's rounds, whatever the method."""
    run = embedded(recipe, "fedavg", tmp_path_factory.mktemp("cohorts") / "run", rounds=len(REASONS) + 2)
    return [list(row["cohort"]) for row in run.trials[0].rounds]


@pytest.fixture(scope="module")
def alone(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return embedded_once(recipe, tmp_path_factory)


@pytest.mark.parametrize("method", METHODS)
def test_sites_give_the_same_as_one_machine(
    method: str, recipe: str, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods=method))
    assert tiny.equal(model(alone(method)), model(tmp_path / "sites"))
    assert records(alone(method)) == records(tmp_path / "sites")
    assert (tmp_path / "sites" / "report.html").is_file()


def test_a_server_has_another_device_than_its_sites(
    recipe: str, alone: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies lie on the server's disk first, and go from there to its device; after a restart they do so too."""
    monkeypatch.setattr(
        "fedkeep.experiment.build.check_device", lambda name: DEVICE if name == "cuda" else check_device(name)
    )
    monkeypatch.setattr("fedkeep.flower.server.check_device", lambda name: None)
    begun = config(recipe, tmp_path / "sites", methods="scaffold", device="cuda")
    with fake_device():
        with pytest.raises(Killed):
            serve(LocalTransport(node_configs(tmp_path / "states"), killing(6)), begun)
        serve(LocalTransport(node_configs(tmp_path / "states")), begun)
    assert tiny.equal(model(alone("scaffold")), model(tmp_path / "sites"))
    assert records(alone("scaffold")) == records(tmp_path / "sites")


@pytest.mark.parametrize("letter", ["\u9662"])  # of three bytes
def test_a_site_may_have_a_long_name_in_any_script(letter: str, recipe: str, tmp_path: Path) -> None:
    sites = node_configs(tmp_path / "states")
    names = letter * 100, letter * 99 + "0"
    sites |= {node: replace(sites[node], site=name) for node, name in zip((100, 101), names, strict=True)}
    begun = config(recipe, tmp_path / "run", ("run.cohort_size=8",), methods="scaffold", rounds=2)
    with pytest.raises(Killed):
        serve(LocalTransport(sites, killing(8)), begun)
    serve(LocalTransport(sites), begun)
    assert [record["lost"] for record in records(tmp_path / "run")] == [{}, {}]
    assert all(set(names) < set(record["cohort"]) for record in records(tmp_path / "run"))
    assert len(list((tmp_path / "states").glob("*/*/"))) == len(sites)


def test_the_server_logs_and_sites_need_no_package_for_it(
    recipe: str, alone: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written = tmp_path / "run", dict[int, Any]()
    writer = SimpleNamespace(write=written.__setitem__, close=lambda: None)
    monkeypatch.setitem(tracking.WRITERS, "tensorboard", lambda trial, finished: writer)
    serve(LocalTransport(node_configs(tmp_path / "states")), config(recipe, out, methods="fedavg", log="tensorboard"))
    assert list(written) == [row["round"] for row in records(out)]
    assert {"accuracy", "forgetting"} <= set(written[1])
    assert tiny.equal(model(alone("fedavg")), model(out)), "logging changes no result"
    for log, says in (("tensorbord", "Did you mean 'tensorboard'"), ("wandb", "'wandb>=")):
        monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not installed
        with pytest.raises(FedKeepError, match=says):
            serve(LocalTransport({}), config(recipe, tmp_path / "none", methods="fedavg", log=log))
        assert not (tmp_path / "none").exists()


def test_private_sites_give_the_same_as_one_machine_and_tell_what_they_spent(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    private = (*SETTINGS, "privacy.noise_multiplier=1.0", "privacy.counts_epsilon=1.0")
    embedded(recipe, "sfedkd", tmp_path / "one", 1, private)
    serve(
        LocalTransport(node_configs(tmp_path / "states")),
        config(recipe, tmp_path / "sites", private, methods="sfedkd", rounds=1),
    )
    assert records(tmp_path / "one") == records(tmp_path / "sites")
    assert records(tmp_path / "sites")[0]["privacy"]["clients"]


def test_a_name_of_a_file_stands_for_one_text(tmp_path: Path) -> None:
    assert quoted_name("St. Mary's / 2", 255) == "St.%20Mary%27s%20%2F%202", "as earlier versions wrote it"
    assert quoted_name("..", 255) == "%2E%2E", "a site must not choose its folder"
    assert quoted_name("\u0431" * 42, 255) == "%D0%B1" * 42
    long, other = quoted_name("\u0431" * 43, 255), quoted_name("\u0431" * 44, 255)
    assert len(long) == len(other) == 255
    assert long != other
    assert quoted_name(long, 255) != long, "nobody can take another's by calling himself so"


def test_a_real_sites_noise_is_its_own_secret_and_stays(tmp_path: Path) -> None:
    secret = stored_secret(tmp_path / "a")
    assert stored_secret(tmp_path / "a") == secret != stored_secret(tmp_path / "b")
    assert len(bytes.fromhex(secret.decode())) == 32
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "a" / "secret").write_text("123456789")  # as an earlier version wrote it
    with pytest.raises(DamagedFile, match="Remove it"):
        stored_secret(tmp_path / "a")


def test_a_real_sites_training_has_new_noise_each_time(recipe: str, tmp_path: Path) -> None:
    """The same noise on two trainings, of other models, options or runs, would tell their difference."""
    context = tiny.simulation(FedAvg()).context
    same = [context.fresh_noise("noise", task=1, round=1, client="a", use=0).normal((4,)) for _ in range(2)]
    assert same[0].equal(same[1]), "a simulation is reproducible"
    context.noise_secret = stored_secret(tmp_path)
    other = [context.fresh_noise("noise", task=1, round=1, client="a", use=0).normal((4,)) for _ in range(2)]
    assert not other[0].equal(other[1])
    told = [context.repeated_noise("means", torch.tensor([value])).normal((4,)) for value in (0.5, 0.5, 0.25)]
    assert told[0].equal(told[1])
    assert not told[0].equal(told[2])


def test_only_client_steps_can_be_asked_of_a_site(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg", rounds=1))
    site, kind, envelope = local_transport.sent[-1]
    asked = Envelope({**envelope.head, "request": {**envelope.head["request"], "step": "round"}}, envelope.tensors)
    number = local_transport.send(100 + int(site), kind, asked, 1, 1.0)
    assert isinstance(number, str)
    (reply,) = local_transport.receive([number]).values()
    assert isinstance(reply, Envelope)
    assert reply.head == {"error": "'round' is not a client step of fedavg."}


def test_a_site_takes_no_step_of_another(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg", rounds=1))
    site, kind, envelope = local_transport.sent[-1]
    number = local_transport.send(100 + (int(site) + 1) % 8, kind, envelope, 1, 1.0)
    assert isinstance(number, str)
    (reply,) = local_transport.receive([number]).values()
    assert isinstance(reply, Envelope)
    assert reply.head == {"error": f"this is site {(int(site) + 1) % 8}, and the server asks {site}."}


def kills() -> Iterator[Any]:
    for case in itertools.product(("sfedkd", "scaffold", "moon"), (0, 6, 9)):
        yield pytest.param(*case, marks=() if case in KILLED else pytest.mark.slow)


@pytest.mark.parametrize(("method", "after"), list(kills()))
def test_a_server_that_was_killed_lets_nobody_work_twice(
    method: str,
    after: int,
    recipe: str,
    alone: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    performed: list[str] = []
    store = StateStore.store

    def watch(self: StateStore, call: str, state: Any, found: Any) -> None:
        performed.append(f"{self.folder.name} {call}")
        store(self, call, state, found)

    monkeypatch.setattr(StateStore, "store", watch)
    first = LocalTransport(node_configs(tmp_path / "states"), killing(after))
    with pytest.raises(Killed):
        serve(first, config(recipe, tmp_path / "sites", methods=method))
    serve(LocalTransport(node_configs(tmp_path / "states")), config(recipe, tmp_path / "sites", methods=method))
    assert tiny.equal(model(alone(method)), model(tmp_path / "sites"))
    assert records(alone(method)) == records(tmp_path / "sites")
    assert len(performed) == len(set(performed))


def test_a_message_that_comes_twice_gets_the_same_answer(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="scaffold"))
    site, kind, envelope = local_transport.sent[-1]
    node = next(node for node, node_config in local_transport.node_configs.items() if node_config.site == site)
    heads = []
    for _ in range(2):
        number = local_transport.send(node, kind, envelope, 3, 1.0)
        assert isinstance(number, str)
        heads.append(local_transport.receive([number])[number].head)  # type: ignore[union-attr]
    assert heads[0] == heads[1], "seconds of training are in it, so it was not performed again"


def test_a_message_that_comes_late_removes_nothing_that_is_needed(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="scaffold", rounds=6))
    kept = set((tmp_path / "states").rglob("*.state"))
    for site, kind, envelope in list(local_transport.sent):
        if kind == "perform":
            local_transport.send(100 + int(site), kind, envelope, 1, 1.0)
    assert kept <= set((tmp_path / "states").rglob("*.state"))


def spoiling(hows: Mapping[int, str], victims: Mapping[int, str]) -> Tamper:
    """Let one site answer badly in some rounds, each time in another way."""

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope | Fault | None:
        request = asked.head.get("request", {})
        round = request.get("round")
        if round not in hows or (node_config.site, request.get("step")) != (victims[round], "train"):
            return reported
        first = next(iter(reported.tensors))
        bad = {
            "error": Envelope({"error": "ZeroDivisionError: on purpose"}),
            "silence": None,
            "gone": no_reply("no answer: the node is gone"),
            "nan": Envelope(reported.head, {**reported.tensors, first: reported.tensors[first] * torch.nan}),
            "shape": Envelope(reported.head, {**reported.tensors, first: torch.zeros(3, 5)}),
            "type": Envelope(reported.head, {**reported.tensors, first: reported.tensors[first].double()}),
            "missing": Envelope(reported.head, {name: reported.tensors[name] for name in list(reported.tensors)[1:]}),
            "nonsense": Envelope({"answer": {"list": [1]}}),
            "empty": Envelope({}),
        }
        return bad[hows[round]]

    return tamper


REASONS = {
    "error": "its site says: ZeroDivisionError: on purpose",
    "silence": "did not answer within 0.3 s",
    "gone": "the node is gone",
    "nan": "not finite",
    "shape": "shape",
    "type": "float64 instead of float32",
    "missing": "names a tensor that the message does not hold",
    "nonsense": "answered with what train does not give",
    "empty": "answered with what train does not give",
}


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "sfedkd"])
def test_a_bad_answer_loses_a_site_and_no_run(
    method: str, recipe: str, cohorts: list[list[str]], tmp_path: Path
) -> None:
    assert all(len(cohort) == 4 for cohort in cohorts)
    hows = dict(enumerate(REASONS, start=2))
    victims = {round: cohorts[round - 1][1] for round in hows}
    local_transport = LocalTransport(node_configs(tmp_path / "states"), spoiling(hows, victims))
    run = serve(local_transport, config(recipe, tmp_path / "sites", methods=method, deadline=0.3, rounds=len(cohorts)))
    found = records(tmp_path / "sites")
    assert [record["cohort"] for record in found] == cohorts
    assert [list(record["lost"]) for record in found] == [[], *([victim] for victim in victims.values()), []]
    log = (tmp_path / "sites" / "server.log").read_text().splitlines()
    for round, how in hows.items():
        assert REASONS[how] in found[round - 1]["lost"][victims[round]], how
        (output,) = (text for text in log if f"round {round} of {len(cohorts)}" in text)
        assert f"; lost {victims[round]}: " in output, how
    assert not any(record["rolled_back"] for record in found)
    assert run.trials[0].finished


def test_a_gradient_of_the_wrong_shape_is_refused_too(recipe: str, cohorts: list[list[str]], tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if asked.head.get("request", {}).get("round") != 2 or node_config.site != victim:
            return reported
        fields = reported.head["answer"]["tuple"][0]["tuple"][0]["tuple"][0]["fields"]  # of the one outcome, its reply
        name = fields["change"]["dict"][0][1]["tensor"]
        return Envelope(reported.head, {**reported.tensors, name: torch.zeros(2)})

    victim = cohorts[1][0]
    serve(
        LocalTransport(node_configs(tmp_path / "states"), tamper),
        config(recipe, tmp_path / "sites", methods="scaffold"),
    )
    assert "shape" in records(tmp_path / "sites")[1]["lost"][victim]


def test_too_few_answers_undo_the_round(recipe: str, cohorts: list[list[str]], tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"), spoiling({2: "error"}, {2: cohorts[1][1]}))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="scaffold", min_clients=4))
    assert [record["rolled_back"] for record in records(tmp_path / "sites")] == [False, True, False]


def test_a_site_that_starts_again_with_other_data_between_two_trials_is_refused(recipe: str, tmp_path: Path) -> None:
    sites = node_configs(tmp_path / "states")

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if kind == "perform":
            sites[107] = replace(sites[107], partition_id=0)
        return reported

    run = serve(
        LocalTransport(sites, tamper),
        config(recipe, tmp_path / "sites", methods="sfedkd,fedavg", rounds=1, min_clients=2),
    )
    first, second = (trial.info["examples"] for trial in run.trials)
    assert first.keys() - second.keys() == {"7"}
    assert "examples, and had" in (tmp_path / "sites" / "server.log").read_text()


def test_a_site_that_was_away_while_a_trial_began_is_in_the_next(recipe: str, tmp_path: Path) -> None:
    away: set[str] = set()

    class Absent(LocalTransport):
        def nodes(self) -> dict[int, str]:
            return {node: name for node, name in super().nodes().items() if self.node_configs[node].site not in away}

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        text = asked.head.get("recipe", "")
        if kind == "perform":
            away.update({"7"} if "sfedkd" in text else ())
            away.difference_update({"7"} if '"fedavg"' in text else ())
        return reported

    transport = Absent(node_configs(tmp_path / "states"), tamper)
    run = serve(
        transport, config(recipe, tmp_path / "sites", methods="sfedkd,fedavg,scaffold", rounds=1, min_clients=2)
    )
    assert ["7" in trial.info["examples"] for trial in run.trials] == [True, False, True]
    assert "this trial begins without 7" in (tmp_path / "sites" / "server.log").read_text()


def test_a_node_that_comes_back_is_no_second_site(recipe: str, tmp_path: Path) -> None:
    """Site 7 never comes; site 0 joins on another node, and then its former node is seen again."""
    looks = itertools.count(1)

    class Returns(LocalTransport):
        def nodes(self) -> dict[int, str]:
            look = next(looks)
            gone = {107} | ({100} if 3 <= look < 6 else set()) | ({200} if look < 3 else set())
            return {node: "" for node in self.node_configs if node not in gone}

    sites = node_configs(tmp_path / "states")
    transport = Returns({**sites, 200: sites[100]})
    serve(transport, config(recipe, tmp_path / "sites", methods="fedavg", rounds=1, min_clients=2, wait=1.0))
    said = (tmp_path / "sites" / "server.log").read_text()
    assert "the run begins with 7 of 8 sites" in said
    assert "which is connected, is '0' already" in said


def test_too_few_sites_stop_a_run_that_can_be_continued(recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if asked.head.get("request", {}).get("round") == 2:
            local_transport.node_configs = {}  # all cables are cut
        return reported

    local_transport = LocalTransport(node_configs(tmp_path / "states"), tamper)
    with pytest.raises(RunError, match=r"too few sites.*Missing: .*The finished rounds are saved"):
        serve(local_transport, config(recipe, tmp_path / "sites", methods="scaffold", min_clients=3))
    assert len(records(tmp_path / "sites")) >= 1
    serve(
        LocalTransport(node_configs(tmp_path / "states")),
        config(recipe, tmp_path / "sites", methods="scaffold", min_clients=3),
    )
    assert len(records(tmp_path / "sites")) == 3


def test_a_run_waits_for_sites_that_come_later(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport({})
    looks = [0]

    def nodes() -> dict[int, str]:
        looks[0] += 1
        if looks[0] == 3:
            local_transport.node_configs = node_configs(tmp_path / "states")
        return dict.fromkeys(local_transport.node_configs, "")

    local_transport.nodes = nodes  # type: ignore[method-assign]
    serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg", wait=5.0))
    assert looks[0] > 3


def test_who_is_not_of_the_run_is_turned_away(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "RETRY_SECONDS", 0.0)
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    monkeypatch.setattr(executor, "POLL_SECONDS", 0.0)
    add: Sequence[tuple[int, str]] = ((200, "stranger"), (201, "3"))

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if asked.head.get("request", {}).get("round") == 1:
            for node, name in add:
                local_transport.node_configs.setdefault(
                    node, node_configs(tmp_path / "states", 8)[103].__class__(site=name, partition_id=3)
                )
        return reported

    local_transport.tamper = tamper
    serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg"))
    log = (tmp_path / "sites" / "server.log").read_text()
    assert "'stranger' is no site of this run" in log
    assert "node 103, which is connected, is '3' already" in log
    assert all(site != "stranger" for site, kind, _ in local_transport.sent if kind == "perform")


def test_a_registered_name_is_binding(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    local_transport.registered = {103: "4"}
    serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg", rounds=1))
    assert not any(site == "3" for site, kind, _ in local_transport.sent if kind == "perform")
    assert "it calls itself '3' and is registered as '4'" in (tmp_path / "sites" / "server.log").read_text()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"error": "no"}, "no"),
        ({"examples": [-1]}, "valid numbers of examples"),
        ({"examples": [True]}, "valid numbers of examples"),
        ({"examples": [10**12]}, "max-examples=10000000"),
        ({"examples": {"0": 9}}, "its number of examples in each task"),
        ({"site": ["3"]}, "valid site name"),
        (None, "it has not introduced itself"),
    ],
)
def test_no_site_stops_a_run_with_its_introduction(
    answer: dict[str, Any] | None, reason: str, recipe: str, tmp_path: Path
) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope | None:
        if node_config.site != "3":
            return reported
        return None if answer is None else Envelope({**reported.head, **answer})

    local_transport = LocalTransport(node_configs(tmp_path / "states"), tamper)
    settings = ("run.cohort_size=8", "auxiliary.images_per_class=2")
    serve(local_transport, config(recipe, tmp_path / "run", settings, methods="fedavg", rounds=1, wait=0.1))
    assert sorted(records(tmp_path / "run")[0]["cohort"]) == sorted(set("01234567") - {"3"})
    log = (tmp_path / "run" / "server.log").read_text()
    assert "the run begins with 7 of 8 sites. Node 103: " in log
    assert reason in log


def test_the_loss_check_runs_at_sites_as_in_a_simulation(recipe: str, tmp_path: Path) -> None:
    settings = ("run.cohort_size=8", "auxiliary.images_per_class=4", "defense.loss_check=server")
    embedded(recipe, "fedavg", tmp_path / "one", 2, settings)
    given = config(recipe, tmp_path / "run", settings, methods="fedavg", rounds=2)
    serve(LocalTransport(node_configs(tmp_path / "s")), given)
    assert records(tmp_path / "run") == records(tmp_path / "one")


class OneNode:
    """A transport to one node, whose replies a test gives."""

    def __init__(self) -> None:
        self.sent = 0
        self.replies: dict[str, Envelope | Fault] = {}

    def nodes(self) -> dict[int, str]:
        return {1: ""}

    def send(self, node: int, kind: MessageKind, envelope: Envelope, round: int, seconds: float) -> str:
        self.sent += 1
        return str(self.sent)

    def receive(self, message_ids: Any) -> dict[str, Envelope | Fault]:
        return {name: self.replies.pop(name) for name in list(message_ids) if name in self.replies}


def test_a_site_that_does_not_introduce_itself_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its app may have died, or its SuperNode may have given it up on a busy machine; or it is only slow."""
    now = 100.0
    monkeypatch.setattr(transports.time, "monotonic", lambda: now)
    transport = OneNode()
    registry = transports.SiteRegistry(transport, Envelope({}), 600.0)
    for now, sent in ((100.0, 1), (249.0, 1), (251.0, 2), (252.0, 2)):  # noqa: B007
        registry.refresh()
        assert transport.sent == sent
    transport.replies["2"] = Envelope({"site": "a", "examples": [5]})
    registry.refresh()
    transport.replies["1"] = Envelope({"site": "a", "examples": [9]})
    registry.refresh()
    assert registry.nodes() == {"a": 1}
    assert registry.sizes == {"a": [5]}, "what it told first counts"


def test_a_run_to_which_no_site_fits_stops_at_once(recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        return Envelope({"error": "another version"})

    with pytest.raises(RunError, match=r"0 of 8 sites are connected.*another version"):
        serve(
            LocalTransport(node_configs(tmp_path / "states"), tamper),
            config(recipe, tmp_path / "run", methods="fedavg", wait=60.0),
        )


def test_a_site_too_many_stops_no_run(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    local_transport.node_configs[300] = replace(local_transport.node_configs[100], site="extra")
    serve(local_transport, config(recipe, tmp_path / "run", methods="fedavg", rounds=1))
    assert "These came too late: extra." in (tmp_path / "run" / "server.log").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}'])
def test_a_damaged_file_of_the_sites_is_named(text: str, recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"), killing(3))
    with pytest.raises(Killed):
        serve(local_transport, config(recipe, tmp_path / "run", methods="fedavg"))
    (file,) = (tmp_path / "run").glob("trials/*/sites.json")
    file.write_text(text)
    local_transport.tamper = None
    with pytest.raises(RunError, match=r"sites\.json is damaged"):
        serve(local_transport, config(recipe, tmp_path / "run", methods="fedavg"))


def test_data_that_do_not_fit_are_told_at_both_ends(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange = tmp_path / "strange"
    torch_images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    from fedkeep.data import DataSet

    odd = DataSet(
        "odd",
        {"input": torch_images, "label": torch.tensor([0, 1, 0, 1])},
        {"input": torch_images, "label": torch.tensor([0, 1, 0, 1])},
        ("0", "cat"),
        (0.0,),
        (1.0,),
    )
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    with pytest.MonkeyPatch.context() as patch:
        own = {str(strange): odd}
        patch.setattr(
            "fedkeep.flower.client_handler.load_data", lambda name, *rest: own.get(name) or load_data(name, *rest)
        )
        local_transport.node_configs[103] = local_transport.node_configs[103].__class__(site="3", data=str(strange))
        serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg", wait=0.1))
    assert "3" not in {site for row in records(tmp_path / "sites") for site in row["cohort"]}
    assert "1 of them are not among the run's 10" in (tmp_path / "sites" / "server.log").read_text()
    assert "this site's classes that the run has not: 'cat'" in caplog.messages


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"settings": ["run.evaluate_local_models=true"]}, "evaluate_local_models"),
        ({"device": "tpu"}, "cannot use device"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_begins(
    changes: dict[str, Any], reported: str, recipe: str, tmp_path: Path
) -> None:
    with pytest.raises(FedKeepError, match=reported):
        serve(LocalTransport({}), config(recipe, tmp_path / "sites", **changes))
    assert not (tmp_path / "sites").exists()


def test_a_folder_is_continued_or_refused_with_a_reason(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg"))
    with pytest.raises(RunError, match="is finished"):
        serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg"))
    begun = tmp_path / "sites" / "recipe.toml"
    whole = read_toml(begun)
    write_toml(begun, whole.replace("guidance_scale = 2.0\n", ""))
    assert read_toml(begun) != whole
    info = read_json(begun.with_name("run.json"))
    del info["identity"]["settings"]["generator.guidance_scale"]
    write_json(begun.with_name("run.json"), info)
    (manifest,) = begun.parent.glob("trials/*/manifest.json")
    files, further = read_manifest(manifest)
    del further["identity"]["settings"]["generator.guidance_scale"]
    write_manifest(manifest, files, **further)
    with pytest.raises(RunError, match="is finished"):  # a version without the option began it
        serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg"))
    with pytest.raises(RunError, match="another recipe"):
        serve(local_transport, config(recipe, tmp_path / "sites", methods="fedavg", rounds=5))
    assert trial_name(load_recipe(recipe, methods=["fedavg"]).methods[0], 0) == "fedavg-seed0"


def test_sites_that_wait_for_their_turn_work_ahead(recipe: str, tmp_path: Path) -> None:
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, config(recipe, tmp_path / "sites", methods="sfedkd"))
    asked = [envelope.head["request"] for _, kind, envelope in local_transport.sent if kind == "perform"]
    steps = [request["step"] for request in asked if request["round"] == 2 and request["step"] != "send_label_counts"]
    assert steps == ["prepare"] * 4 + ["train"] * 4


def test_states_are_kept_as_long_as_they_may_be_named(recipe: str, tmp_path: Path) -> None:
    serve(
        LocalTransport(node_configs(tmp_path / "states")),
        config(recipe, tmp_path / "sites", methods="scaffold", rounds=6),
    )
    for site in (folder for run in (tmp_path / "states").iterdir() for folder in run.iterdir()):
        assert len(list(site.glob("*.state"))) <= 3, "this round's, and those of the two checkpoints that are kept"


@pytest.mark.parametrize("method", [pytest.param("sfedkd", marks=pytest.mark.slow), "scaffold"])
def test_a_server_that_goes_back_to_its_checkpoint_before_finds_the_states_of_all_sites(
    method: str, recipe: str, tmp_path: Path
) -> None:
    """Sites were asked in the round after both, some of them twice."""
    settings = ("run.cohort_size=8", "auxiliary.images_per_class=2")
    embedded(recipe, method, tmp_path / "one", 3, settings)
    answered = [0]

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        answered[0] += asked.head.get("request", {}).get("round") == 3
        if answered[0] > 6:
            raise Killed
        return reported

    begun = config(recipe, tmp_path / "run", settings, methods=method)
    with pytest.raises(Killed):
        serve(LocalTransport(node_configs(tmp_path / "states"), tamper), begun)
    (file,) = (tmp_path / "run").glob("trials/*/checkpoint/server-2.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    serve(LocalTransport(node_configs(tmp_path / "states")), begun)
    assert "goes on from its checkpoint of round 1" in (tmp_path / "run" / "server.log").read_text()
    assert records(tmp_path / "one") == records(tmp_path / "run")
    assert tiny.equal(model(tmp_path / "one"), model(tmp_path / "run"))


def outweighing(reported: Envelope, **changes: Any) -> Envelope:
    head = json.loads(json.dumps(reported.head))
    head["answer"]["tuple"][0]["tuple"][0]["tuple"][0]["fields"].update(changes)
    return Envelope(head, reported.tensors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_examples": 10**15}, "trained on"),
        ({"num_examples": -5}, "num_examples -5"),
        ({"num_examples": -(10**400)}, "num_examples beyond -1e+300"),
        ({"num_steps": -1}, "num_steps -1"),
        ({"num_steps": 10**9}, "in 1000000000 steps"),
        ({"loss": 1e308}, "loss beyond 1e+300"),
        ({"loss": 10**400}, "too large to convert to float"),
    ],
)
def test_a_site_cannot_count_for_more_than_it_has(
    changes: dict[str, int], reason: str, recipe: str, cohorts: list[list[str]], tmp_path: Path
) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        bad = asked.head.get("request", {}).get("round") == 2 and node_config.site == victim
        return outweighing(reported, **changes) if bad else reported

    victim = cohorts[1][0]
    serve(
        LocalTransport(node_configs(tmp_path / "states"), tamper), config(recipe, tmp_path / "sites", methods="fedavg")
    )
    found = records(tmp_path / "sites")
    assert reason in found[1]["lost"][victim]
    assert not any(record["rolled_back"] for record in found)


@pytest.mark.parametrize(
    ("uses", "reason"),
    [
        (["private steps at x", 1], "privacy spent on 'private steps at x', on which clients of this run spend none"),
        (["private steps at 0.5", 10**400], "on which clients of this run spend none"),
        (["private steps at 0.5", 1.5], "what train does not give"),
        (["private steps at 0.5", "1"], "what train does not give"),
    ],
)
def test_what_a_site_spends_of_its_privacy_is_checked(
    uses: list[Any], reason: str, recipe: str, cohorts: list[list[str]], tmp_path: Path
) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if kind != "perform" or node_config.site != cohorts[0][0]:
            return reported
        head = json.loads(json.dumps(reported.head))
        head["answer"]["tuple"][0]["tuple"][0]["tuple"][2]["dict"].append(uses)
        return Envelope(head, reported.tensors)

    out = tmp_path / "sites"
    serve(LocalTransport(node_configs(tmp_path / "states"), tamper), config(recipe, out, methods="fedavg", rounds=1))
    (record,) = records(out)
    assert reason in record["lost"][cohorts[0][0]]
    assert "privacy" not in record


def test_two_server_apps_do_not_play_one_cell(recipe: str, tmp_path: Path) -> None:
    begun = config(recipe, tmp_path / "run", methods="fedavg")

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if kind == "perform" and not again:
            again.append(1)
            with pytest.raises(TrialBusy, match="another server app"):
                serve(LocalTransport(node_configs(tmp_path / "others")), begun)
        return reported

    again: list[int] = []
    serve(LocalTransport(node_configs(tmp_path / "states"), tamper), begun)
    assert again


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (torch.ones(99), "of shape"),
        (torch.ones(10, dtype=torch.int64), "of shape"),
        (torch.full((10,), -1.0), "negative or not whole numbers"),
        (torch.full((10,), 12.5), "negative or not whole numbers"),
        (torch.full((10,), 1e6), "of 10000000 examples, and it has"),
    ],
)
def test_label_counts_that_are_none_lose_the_site(bad: torch.Tensor, reason: str, recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        step = asked.head.get("request", {}).get("step")
        if step != "send_label_counts" or node_config.site != victims.setdefault("first", node_config.site):
            return reported
        return Envelope(reported.head, dict.fromkeys(reported.tensors, bad))

    victims: dict[str, str] = {}
    serve(
        LocalTransport(node_configs(tmp_path / "states"), tamper),
        config(recipe, tmp_path / "run", methods="sfedkd", rounds=1),
    )
    reported = records(tmp_path / "run")[0]["lost"][victims["first"]]
    assert "label counts" in reported
    assert reason in reported


@pytest.mark.parametrize("seconds", [-1.0, {"float": "nan"}, {"float": "inf"}])
def test_seconds_that_cannot_be_lose_the_site(seconds: Any, recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if kind == "perform" and node_config.site == victims.setdefault("first", node_config.site):
            answers, _, teachers = reported.head["answer"]["tuple"]
            return Envelope({**reported.head, "answer": {"tuple": [answers, seconds, teachers]}}, reported.tensors)
        return reported

    victims: dict[str, str] = {}
    serve(
        LocalTransport(node_configs(tmp_path / "states"), tamper),
        config(recipe, tmp_path / "run", methods="fedavg", rounds=1),
    )
    assert "a training of" in records(tmp_path / "run")[0]["lost"][victims["first"]]


def test_an_old_reply_sent_again_is_refused(recipe: str, cohorts: list[list[str]], tmp_path: Path) -> None:
    """Whatever it claims to answer: each reply names its call, and a model that was sent before is known."""
    (first, *_), later = sorted(set(cohorts[0]) & set(cohorts[1])), 2
    old: dict[str, Envelope] = {}

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if kind != "perform" or node_config.site != first:
            return reported
        if asked.head["request"]["round"] == 1:
            old["reply"] = reported
        elif asked.head["request"]["round"] == later:
            call = asked.head["call"] if stamped else old["reply"].head["call"]
            return Envelope({**old["reply"].head, "call": call}, old["reply"].tensors)
        return reported

    for stamped, reason in ((False, "answered another call"), (True, "had answered with before")):
        out = tmp_path / str(stamped)
        transport = LocalTransport(node_configs(tmp_path / f"states-{stamped}"), tamper)
        serve(transport, config(recipe, out, methods="fedseq", rounds=2))
        found = records(out)[1]
        assert reason in found["lost"][first]
        assert found["refused"] == [first]


FORGED = "away\n2026-01-01 INFO all is well \x1b[2J\u202e" + "x" * 5000


def test_what_a_site_says_forges_no_line_of_a_log(recipe: str, cohorts: list[list[str]], tmp_path: Path) -> None:
    """Neither with an error, nor with the name of a tensor that is no model's, nor as it comes in again."""
    victims = cohorts[1][:2]

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope | Fault:
        if asked.head.get("request", {}).get("round") != 2 or node_config.site not in victims:
            return reported
        if node_config.site == victims[0]:
            return Envelope({"error": FORGED})
        head = json.loads(json.dumps(reported.head))
        model = head["answer"]["tuple"][0]["tuple"][0]["tuple"][0]["fields"]["model"]["dict"]
        model[0][0] = FORGED
        return Envelope(head, reported.tensors)

    serve(LocalTransport(node_configs(tmp_path / "states"), tamper), config(recipe, tmp_path / "run", methods="fedavg"))
    lost = records(tmp_path / "run")[1]["lost"]
    assert sorted(lost) == sorted(victims)
    assert all("all is well" in reason and reason.isprintable() and len(reason) <= 1000 for reason in lost.values())
    lines = (tmp_path / "run" / "server.log").read_text().split("\n")
    assert all(local_transport.isprintable() for local_transport in lines)
    assert not any(local_transport.startswith("2026-01-01 INFO all") for local_transport in lines)


@pytest.mark.parametrize("how", ["error", "lost", "name"])
def test_a_newcomer_forges_no_line_of_a_log(how: str, recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope | Fault:
        if node_config.site != "3":
            return reported
        bad = {
            "error": Envelope({"error": FORGED}),
            "lost": no_reply(FORGED),
            "name": Envelope({**reported.head, "site": "3\n4"}),
        }
        return bad[how]

    serve(
        LocalTransport(node_configs(tmp_path / "states"), tamper),
        config(recipe, tmp_path / "run", methods="fedavg", rounds=1),
    )
    assert all(
        local_transport.isprintable() for local_transport in (tmp_path / "run" / "server.log").read_text().split("\n")
    )


def test_a_report_that_a_kill_left_unwritten_is_written(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = config(recipe, tmp_path / "run", methods="fedavg", rounds=1)

    def killed(folder: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fedkeep.flower.server.write_all", killed)
        with pytest.raises(Killed):
            serve(LocalTransport(node_configs(tmp_path / "states")), begun)
    assert not (tmp_path / "run" / "report.html").exists()
    local_transport = LocalTransport(node_configs(tmp_path / "states"))
    serve(local_transport, begun)
    assert (tmp_path / "run" / "report.html").is_file()
    assert not local_transport.sent, "nobody had to be asked"
    with pytest.raises(RunError, match="is finished"):
        serve(local_transport, begun)


@pytest.mark.parametrize(("rounds", "run_rounds"), [(2, 2), (6, 3)])
def test_a_run_whose_every_round_is_rolled_back_stops_and_can_begin_anew(
    rounds: int, run_rounds: int, recipe: str, tmp_path: Path
) -> None:
    begun = config(recipe, tmp_path / "run", methods="fedavg", rounds=rounds, min_clients=4)

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        return Envelope({"error": "out of order"}) if kind == "perform" else reported

    with pytest.raises(RunError, match=rf"too few sites: fewer than 4 answered in each of {run_rounds} rounds"):
        serve(LocalTransport(node_configs(tmp_path / "states"), tamper), begun)
    assert [record["rolled_back"] for record in records(tmp_path / "run")] == [True] * run_rounds
    run = serve(LocalTransport(node_configs(tmp_path / "states")), begun)
    assert [record["rolled_back"] for record in records(tmp_path / "run")] == [False] * rounds
    assert run.trials[0].finished


@pytest.mark.parametrize(
    ("method", "min_clients"), [("fedavg", 0), pytest.param("scaffold", 4, marks=pytest.mark.slow)]
)
def test_an_outage_in_mid_run_stops_it_and_its_rounds_are_repeated(
    method: str, min_clients: int, recipe: str, cohorts: list[list[str]], tmp_path: Path
) -> None:
    """Whether no site answers any more or, where all are needed, one does not."""

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        round = asked.head.get("request", {}).get("round", 0)
        full = round >= 2 and (not min_clients or node_config.site == cohorts[round - 1][1])
        return Envelope({"error": "OSError: [Errno 28] No space left on device"}) if full else reported

    embedded(recipe, method, tmp_path / "one", 6)
    begun = config(recipe, tmp_path / "run", methods=method, rounds=6, min_clients=min_clients)
    with pytest.raises(RunError, match=r"each of the last 3 rounds.*goes on after round 1\."):
        serve(LocalTransport(node_configs(tmp_path / "states"), tamper), begun)
    assert [record["rolled_back"] for record in records(tmp_path / "run")] == [False, True, True, True]
    run = serve(LocalTransport(node_configs(tmp_path / "states")), begun)
    assert run.trials[0].finished
    assert records(tmp_path / "one") == records(tmp_path / "run")
    assert tiny.equal(model(tmp_path / "one"), model(tmp_path / "run"))


def test_lost_rounds_in_which_sites_spent_of_their_privacy_stay_on_record(
    recipe: str, cohorts: list[list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("opacus")

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        round = asked.head.get("request", {}).get("round", 0)
        return Envelope({"error": "away"}) if round >= 2 and node_config.site == cohorts[round - 1][3] else reported

    private = (*SETTINGS, "privacy.noise_multiplier=1.0")
    begun = config(recipe, tmp_path / "run", private, methods="fedavg", rounds=5, min_clients=4)
    with pytest.raises(RunError, match=r"each of the last 3 rounds.*goes on after round 4\."):
        serve(LocalTransport(node_configs(tmp_path / "states"), tamper), begun)
    lost = records(tmp_path / "run")
    serve(LocalTransport(node_configs(tmp_path / "states")), begun)
    assert records(tmp_path / "run")[:4] == lost
    assert [len(record["privacy"]["clients"]) for record in records(tmp_path / "run")] == [4, 3, 3, 3, 4]


@pytest.mark.slow
def test_what_sites_train_again_is_counted_though_the_server_went_back(recipe: str, tmp_path: Path) -> None:
    """The server's checkpoint of round 2 is damaged: all sites train round 2 again, with other models as it may be."""
    pytest.importorskip("opacus")

    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        if kind == "perform":
            trained[node_config.site] += 1
            if asked.head["request"]["round"] == 3:
                raise Killed
        return reported

    trained: Counter[str] = Counter()
    private = (*SETTINGS, "run.cohort_size=8", "privacy.noise_multiplier=1.0", "privacy.counts_epsilon=1.0")
    begun = config(recipe, tmp_path / "run", private, methods="fedavg", rounds=3)
    with pytest.raises(Killed):
        serve(LocalTransport(node_configs(tmp_path / "states"), tamper), begun)
    (file,) = (tmp_path / "run").glob("trials/*/checkpoint/server-2.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    for reply in (tmp_path / "states").glob("*/*/*.reply"):
        reply.unlink()  # of round 2, which sites no longer have once they were asked in round 3
    (folder,) = (tmp_path / "run").glob("trials/*")
    before = (folder / "privacy.jsonl").read_bytes()
    line = LocalTransport(node_configs(tmp_path / "states"))
    run = serve(line, begun)
    trained.update(site for site, kind, _ in line.sent if kind == "perform")
    assert (folder / "privacy.jsonl").read_bytes().startswith(before)
    (trial,) = run.trials
    once = {
        client: (sample_rate_of(name) or 0.0, count)
        for row in trial.rounds[:1]
        for client, uses in row["privacy"]["clients"].items()
        for name, count in uses.items()
        if name.startswith("private steps")
    }
    taken = [{once[site][0]: times * once[site][1]} for site, times in trained.items()]
    of_steps = max(dp_sgd_epsilon(steps, 1.0, trial.rounds[0]["privacy"]["delta"]) for steps in taken)
    assert trial.epsilon == pytest.approx(of_steps), "nobody was asked for counts"
    assert sorted(set(trained.values())) == [4, 5], "three rounds, the second twice; one site was asked in the third"
    uncounted = replace(trial, ledger=())
    assert trial.epsilon > uncounted.epsilon, "84 steps in place of 126, say"


def test_a_site_that_lost_its_ledger_begins_another(tmp_path: Path) -> None:
    store = StateStore(tmp_path, Identity(run="0" * 32, site="a"), torch.device("cpu"))
    with store.lock():
        first = store.count_spent({"private steps at 0.5": 7}, {"private steps at 0.5": 10, "noise": 1}, 1)
        assert store.count_spent({}, {"noise": 3}, 1) == {}
        again = store.count_spent({}, {"private steps at 0.5": 4, "private label counts": 1}, 2)
        assert [*first.values(), *again.values()] == [3, 7, 1]
        assert store.count_spent({}, {"private label counts": 1}, 2) == again, "the same counts, with the same noise"
        (tmp_path / ("0" * 32) / "a" / "ledger").write_bytes(b"damaged")
        other = store.count_spent({}, {"private steps at 0.5": 2}, 1)
    assert list(other.values()) == [2]
    assert not set(other) & set(first), "under another name, so that the server adds both"
    assert spent_ever(first | other) == {
        name.split()[1]: {"private steps at 0.5": n} for name, n in [(*first, 3), (*other, 2)]
    }


def test_a_few_lost_rounds_stop_no_run(recipe: str, tmp_path: Path) -> None:
    def tamper(node_config: Any, kind: MessageKind, asked: Envelope, reported: Envelope) -> Envelope:
        away = kind == "perform" and asked.head["request"]["round"] in (2, 3, 5, 6)
        return Envelope({"error": "out of order"}) if away else reported

    local_transport = LocalTransport(node_configs(tmp_path / "states"), tamper)
    run = serve(local_transport, config(recipe, tmp_path / "run", methods="scaffold", rounds=6))
    assert [record["rolled_back"] for record in records(tmp_path / "run")] == [False, True, True, False, True, True]
    assert run.trials[0].finished


def test_replies_that_nobody_waits_for_yet_are_not_in_memory(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All eight have answered before the server takes the first; two may be in memory, one after the other."""
    taken: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    read = FlowerExecutor._to_result

    def note(*given: Any) -> Any:
        result = read(*given)
        taken.append(weakref.ref(next(iter(result.reply.model.values()))))
        alive.append(sum(reference() is not None for reference in taken))
        return result

    monkeypatch.setattr(reply_store, "IN_MEMORY", 0)
    monkeypatch.setattr(FlowerExecutor, "_to_result", note)
    settings = ("auxiliary.images_per_class=2", "run.cohort_size=8")
    run = serve(
        LocalTransport(node_configs(tmp_path / "sites")),
        config(recipe, tmp_path / "run", settings, methods="fedavg", rounds=1),
    )
    assert len(taken) == 8
    assert max(alive) <= 2
    embedded(recipe, "fedavg", tmp_path / "one", 1, settings)
    assert tiny.equal(model(run.path), model(tmp_path / "one"))


def test_sites_begin_from_weights_that_the_server_has(recipe: str, tmp_path: Path) -> None:
    weights = tmp_path / "server.safetensors"
    save_file(load_recipe(recipe).model.build((1, 8, 8), 10).state_dict(), weights)
    settings = (*SETTINGS, f"model.weights={weights}")
    alone = embedded(recipe, "sfedkd", tmp_path / "alone", settings=settings)
    serve(
        LocalTransport(node_configs(tmp_path / "states")),
        config(recipe, tmp_path / "sites", settings, methods="sfedkd"),
    )
    assert records(tmp_path / "alone") == records(tmp_path / "sites")
    begun = [next((tmp_path / run / "trials").iterdir()) / "trial.json" for run in ("alone", "sites")]
    infos = [json.loads(file.read_text()) for file in begun]
    assert infos[0]["initial_model"] == infos[1]["initial_model"]
    assert alone.trials[0].initial_model == "the weights of server.safetensors"


@pytest.mark.parametrize(
    ("method", "setting", "reason"),
    [
        ("moon", "model.weights=server.safetensors", "MOON's clients begin from the initial model themselves"),
        ("fedavg", "model.pretraining.passes=1", "trains on the clients' examples in one place, and those of sites"),
        ("sfedkd", "privacy.secure_aggregation=true", "sfedkd passes each client's model on to the next"),
        ("scaffold", "privacy.noise_multiplier=1.0", "privacy.noise_multiplier: "),
    ],
)
def test_what_cannot_be_at_sites_is_told_before_one_is_asked(
    method: str, setting: str, reason: str, recipe: str, tmp_path: Path
) -> None:
    chosen = config(recipe, tmp_path / "sites", (*SETTINGS, setting), methods=method)
    transport = LocalTransport(node_configs(tmp_path / "states"))
    with pytest.raises(FedKeepError, match=reason):
        serve(transport, chosen)
    assert not transport.sent
    assert not (tmp_path / "sites").exists()
