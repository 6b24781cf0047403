"""SecAgg between server and sites: the sum is right with and without lost sites, and no site's update can be read."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from local_transport import LocalTransport, Tamper, node_configs
from trial import Killed, config, embedded, model, records

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedkeep._utils.digests import Identity
from fedkeep.errors import RunError
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.flower import secagg
from fedkeep.flower.secagg import SEED_BYTES, mask, threshold
from fedkeep.flower.server import serve
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.rounds.messages import Fault, no_reply

SECURE = ("auxiliary.images_per_class=2", "run.cohort_size=4", "privacy.secure_aggregation=true")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def alone(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    embedded(recipe, "fedavg", out, 2, SECURE)
    return out


def run_sites(
    recipe: str, folder: Path, tamper: Tamper | None = None, more: Sequence[str] = (), **changes: Any
) -> LocalTransport:
    transport = LocalTransport(node_configs(folder / "states"), tamper)
    usual = {"methods": "fedavg", "rounds": 2}
    serve(transport, config(recipe, folder / "sites", (*SECURE, *more), **(usual | changes)))
    return transport


def silent(victims: Sequence[int], stage: str, rounds: Sequence[int] = (1, 2)) -> Tamper:
    """Lose sites of a round in a stage: those at some positions among the names that are asked in it."""
    seen: dict[str, list[str]] = {}

    def tamper(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope | Fault:
        if kind != "aggregate" or asked.head["stage"] != stage:
            return reply
        aggregation = str(asked.head["aggregation"])
        order = seen.setdefault(aggregation, [])
        order.append(site.site)
        is_lost = int(aggregation.split("-")[0]) in rounds and order.index(site.site) in victims
        return no_reply("the node is gone") if is_lost else reply

    return tamper


@pytest.mark.parametrize("method", ["fedavg", "moon", pytest.param("fedcad", marks=pytest.mark.slow)])
def test_sites_give_the_bits_of_a_simulation(method: str, recipe: str, tmp_path: Path) -> None:
    embedded(recipe, method, tmp_path / "one", 2, SECURE)
    run_sites(recipe, tmp_path, methods=method)
    assert tiny.equal(model(tmp_path / "one"), model(tmp_path / "sites"))
    assert records(tmp_path / "one") == records(tmp_path / "sites")


def test_what_a_site_sends_is_not_its_update(recipe: str, tmp_path: Path) -> None:
    arrived: list[tuple[str, Envelope]] = []

    def watch(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        arrived.append((str(asked.head.get("stage", kind)), reply))
        return reply

    run_sites(recipe, tmp_path, watch, rounds=1)
    updates = {
        file.name.split(".")[0]: StateStore(
            tmp_path / "states", Identity(run=file.parts[-3], site=file.parts[-2]), torch.device("cpu")
        ).update(file.name.split(".")[0])
        for file in (tmp_path / "states").rglob("*.update")
    }
    assert len(updates) == 4
    vectors = {
        str(reply.head["call"]): reply.tensors["vector"] for stage, reply in arrived if "vector" in reply.tensors
    }
    assert vectors.keys() == updates.keys()
    for call, vector in vectors.items():
        masked, update = vector.double(), updates[call].double()
        assert masked.abs().median() > 2**60 > 1e6 * update.abs().max()
        assert bool((vector != updates[call]).all())
        assert abs(float(np.corrcoef(masked, update)[0, 1])) < 0.2
        assert 0.4 < float((vector < 0).double().mean()) < 0.6, "uniform modulo 2^64"
    for kind, reply in arrived:
        if kind == "perform":
            assert not reply.tensors, "the model stays at the site"
            fit = reply.head["answer"]["tuple"][0]["tuple"][0]["tuple"][0]["fields"]
            assert (fit["num_steps"], fit["loss"]) == (0, 0.0)


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS])
def test_the_sum_is_right_without_a_site_that_was_lost(stage: str, recipe: str, tmp_path: Path) -> None:
    run_sites(recipe, tmp_path, silent([1], stage, [1]), rounds=1)
    (record,) = records(tmp_path / "sites")
    ((lost, reason),) = record["lost"].items()
    assert reason == f"the node is gone (secure aggregation, stage {stage})"
    assert not record["rolled_back"]
    # A simulation whose client is lost in training sums the same three updates.
    chosen = load_recipe(recipe, settings=SECURE, methods=["fedavg"], rounds=1)
    simulation = build_simulation(chosen, chosen.methods[0], 0, build_federation(chosen, 0))
    simulation.settings.fault_injector = lambda round, client, step: "gone" if client == lost else None
    simulation.run_round()
    assert tiny.equal(simulation.server.model, model(tmp_path / "sites"))


def test_a_site_that_falls_silent_after_its_vector_is_in_the_sum(recipe: str, alone: Path, tmp_path: Path) -> None:
    run_sites(recipe, tmp_path, silent([0], Stage.UNMASK))
    assert tiny.equal(model(alone), model(tmp_path / "sites"))
    assert records(alone) == records(tmp_path / "sites")


def test_too_few_sites_lose_the_round(recipe: str, tmp_path: Path) -> None:
    run_sites(recipe, tmp_path, silent([0, 1], Stage.COLLECT_MASKED_VECTORS, [1]))
    first, second = records(tmp_path / "sites")
    assert (first["rolled_back"], second["rolled_back"]) == (True, False)
    assert any("2 of 4 sites answered" in reason and "3 are needed" in reason for reason in first["lost"].values())


@pytest.mark.slow
def test_a_vector_that_is_no_update_loses_the_round_and_changes_nothing(recipe: str, tmp_path: Path) -> None:
    def spoil(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        round = int(str(asked.head.get("aggregation", "0-")).split("-")[0])
        if "vector" not in reply.tensors or round != 1 or site.site != victims[0]:
            return reply
        return Envelope(reply.head, {"vector": reply.tensors["vector"] + 2**61})

    victims = [records(_cohorts(recipe, tmp_path))[0]["cohort"][0]]
    run_sites(recipe, tmp_path, spoil)
    first, second = records(tmp_path / "sites")
    assert (first["rolled_back"], second["rolled_back"]) == (True, False)
    assert any("which client is the cause cannot be told" in reason for reason in first["lost"].values())


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.slow if "key" in stage else ()) for stage in Stage.all()]
)
def test_nonsense_loses_a_site_or_a_round_and_no_run(stage: str, recipe: str, tmp_path: Path) -> None:
    nonsense: list[Any] = [["x", "y"], None, 3, {"0": "zz"}, ["", [], {}]]
    spoiled: list[str] = []

    def spoil(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        aggregation = asked.head.get("aggregation")
        if kind != "aggregate" or asked.head["stage"] != stage or aggregation in spoiled:
            return reply
        spoiled.append(str(aggregation))
        answer = nonsense[len(spoiled) - 1]
        if stage == Stage.UNMASK and len(spoiled) in (3, 4):  # shares of the right form
            answer = {name: share[::-1] for name, share in reply.head["answer"].items()}
        return Envelope({"answer": answer}, {"vector": torch.zeros(3)})

    run_sites(recipe, tmp_path, spoil, rounds=5)
    found = records(tmp_path / "sites")
    assert len(spoiled) == len(found) == 5
    assert all(record["lost"] or stage == Stage.UNMASK for record in found)
    rolled_back = [stage == Stage.UNMASK and round in (3, 4) for round in range(1, 6)]
    assert [record["rolled_back"] for record in found] == rolled_back


def test_lost_rounds_whose_sum_sites_have_unmasked_are_not_repeated(recipe: str, tmp_path: Path) -> None:
    """Sites that told shares for one sum would give none for another sum of the same updates."""

    def spoil(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope | Fault:
        aggregation = str(asked.head.get("aggregation", "0-"))
        if kind != "aggregate" or aggregation.startswith("000001"):
            return reply
        if asked.head["stage"] == Stage.COLLECT_MASKED_VECTORS and lost.setdefault(aggregation, site.site) == site.site:
            return no_reply("the node is gone")
        if asked.head["stage"] == Stage.UNMASK and isinstance(reply.head["answer"], dict):
            return Envelope({"answer": {name: share[::-1] for name, share in reply.head["answer"].items()}})
        return reply

    lost: dict[str, str] = {}
    with pytest.raises(RunError, match=r"in each of the last 3 rounds.*goes on after round 4\."):
        run_sites(recipe, tmp_path, spoil, rounds=6)
    run_sites(recipe, tmp_path, rounds=6)
    found = records(tmp_path / "sites")
    assert [record["rolled_back"] for record in found] == [False, True, True, True, False, False]


def spoiling(stage: str, spoil: Callable[[Any], Any]) -> tuple[Tamper, list[str]]:
    """Change what the second site that is asked in a stage of round 1 answers; its name is put into the list."""
    asked_before: list[Any] = []
    spoiled: list[str] = []

    def tamper(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        if kind != "aggregate" or asked.head["stage"] != stage or not asked.head["aggregation"].startswith("000001"):
            return reply
        asked_before.append(reply.head["answer"])
        if len(asked_before) != 2:
            return reply
        spoiled.append(site.site)
        return Envelope({**reply.head, "answer": spoil(asked_before)}, reply.tensors)

    return tamper, spoiled


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(lambda answers: answers[0], "a key that"), (lambda answers: answers[1][:1] * 2, "one key twice")],
)
def test_a_site_that_repeats_a_key_is_named_and_the_others_are_summed(
    spoil: Callable[[Any], Any], what: str, recipe: str, tmp_path: Path
) -> None:
    tamper, spoiled = spoiling(Stage.SETUP, spoil)
    run_sites(recipe, tmp_path, tamper, rounds=1)
    (record,) = records(tmp_path / "sites")
    assert not record["rolled_back"]
    assert record["lost"].keys() == set(spoiled)
    assert what in record["lost"][spoiled[0]]


def test_a_site_whose_shares_cannot_be_decrypted_is_named(recipe: str, tmp_path: Path) -> None:
    tamper, spoiled = spoiling(
        Stage.SHARE_KEYS, lambda answers: {name: text[::-1] for name, text in answers[1].items()}
    )
    run_sites(recipe, tmp_path, tamper)
    first, second = records(tmp_path / "sites")
    assert (first["rolled_back"], second["rolled_back"]) == (True, False)
    assert any(f"what {spoiled[0]} sent for this site cannot be decrypted" in text for text in first["lost"].values())


@pytest.mark.slow
def test_a_lost_site_whose_key_is_of_another_kind_loses_a_round_and_no_run(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    create, lost = secagg.create_shares, silent([1], Stage.COLLECT_MASKED_VECTORS, [1])

    def share(secret: bytes, threshold: int, members: int) -> list[bytes]:
        return create(secret if len(secret) == SEED_BYTES else key.private_bytes(*form), threshold, members)

    monkeypatch.setattr(secagg, "create_shares", share)  # at all sites: only the lost one's key is put together
    run_sites(recipe, tmp_path, lost)
    first, second = records(tmp_path / "sites")
    assert (first["rolled_back"], second["rolled_back"]) == (True, False)


def _cohorts(recipe: str, folder: Path) -> Path:
    embedded(recipe, "fedavg", folder / "cohorts", 1, SECURE)
    return folder / "cohorts"


@pytest.mark.parametrize(
    "stage",
    [pytest.param(Stage.SHARE_KEYS, marks=pytest.mark.slow), Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK],
)
def test_a_restarted_server_gets_the_same_sum_and_nobody_trains_twice(
    stage: str, recipe: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    store = StateStore.store
    monkeypatch.setattr(StateStore, "store", lambda self, call, *rest: (trained.append(call), store(self, call, *rest)))

    def kill(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        if kind == "aggregate" and asked.head["stage"] == stage and str(asked.head["aggregation"]).startswith("000002"):
            raise Killed
        return reply

    with pytest.raises(Killed):
        run_sites(recipe, tmp_path, kill)
    run_sites(recipe, tmp_path)
    assert tiny.equal(model(alone), model(tmp_path / "sites"))
    assert records(alone) == records(tmp_path / "sites")
    assert len(trained) == len(set(trained)) == 8


@pytest.mark.slow
def test_rounds_that_are_repeated_unmask_no_second_sum(recipe: str, tmp_path: Path) -> None:
    """All rounds are rolled back, since a site is lost in each, and the run is started again in the same folder."""
    told: dict[str, set[tuple[str, ...]]] = {}

    def watch(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope | Fault:
        if kind == "aggregate" and asked.head["stage"] == Stage.UNMASK and "answer" in reply.head:
            told.setdefault(str(asked.head["call"]), set()).add(tuple(asked.head["question"]["active"]))
        return reply if lose is None else lose(site, kind, asked, reply)  # type: ignore[return-value]

    lose: Tamper | None = silent([0], Stage.COLLECT_MASKED_VECTORS, [1, 2, 3])
    with pytest.raises(RunError, match="all were rolled back"):
        run_sites(recipe, tmp_path, watch, ["run.min_clients=4"], rounds=3)
    assert not told, "a sum that the round discards is not unmasked"
    before = {file.stem for file in (tmp_path / "states").rglob("*.update")}
    lose = None
    run_sites(recipe, tmp_path, watch, ["run.min_clients=4"], rounds=3)
    assert not any(record["rolled_back"] for record in records(tmp_path / "sites"))
    assert before & told.keys(), "the rounds were repeated"
    assert all(len(sums) == 1 for sums in told.values())


def test_rounds_go_on_without_a_site_that_spoiled_all_sums(recipe: str, tmp_path: Path) -> None:
    """Of fewer sites these would be other sums of the same rounds, and no site gives two."""

    def spoil(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        if "vector" not in reply.tensors or site.site != "7":
            return reply
        return Envelope(reply.head, {"vector": reply.tensors["vector"] + 2**61})

    everybody = ["run.cohort_size=8", "run.min_clients=4"]
    with pytest.raises(RunError, match="all were rolled back"):
        run_sites(recipe, tmp_path, spoil, everybody, rounds=5)
    others = {node: site for node, site in node_configs(tmp_path / "states").items() if site.site != "7"}
    asked = config(recipe, tmp_path / "sites", (*SECURE, *everybody), methods="fedavg", rounds=5)
    serve(LocalTransport(others), replace(asked, wait=1.0))
    assert [record["rolled_back"] for record in records(tmp_path / "sites")] == [True, True, True, False, False]


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_site_unmasks_one_sum_of_an_update_and_answers_each_stage_once(
    rounds: int, recipe: str, tmp_path: Path
) -> None:
    transport = run_sites(recipe, tmp_path, rounds=rounds)
    if (
        rounds > 1
    ):  # back to an older checkpoint: the first round's updates, which the sites have pruned, are made again
        for name, kind, envelope in list(transport.sent):
            if kind == "perform" and str(envelope.head["call"]).startswith("000001-"):
                transport.send(100 + int(name), kind, envelope, 1, 1.0)

    def ask(node: int, head: dict[str, Any]) -> dict[str, Any]:
        number = transport.send(node, "aggregate", Envelope(head), 1, 1.0)
        (reply,) = transport.receive([str(number)]).values()
        assert isinstance(reply, Envelope)
        return reply.head

    stages = [
        (site, envelope.head)
        for site, kind, envelope in transport.sent
        if kind == "aggregate" and str(envelope.head["aggregation"]).startswith("000001-")
    ]
    site, unmask = next((site, head) for site, head in stages if head["stage"] == Stage.UNMASK)
    assert ("answer" in ask(100 + int(site), unmask)) == (rounds == 1), "the same question has the same answer"
    active = unmask["question"]["active"]
    fewer = {"active": [name for name in active if name != active[-1]], "dead": [active[-1]]}
    if site == active[-1]:
        fewer = {"active": active[1:], "dead": active[:1]}
    if rounds == 1:
        assert "to another question" in ask(100 + int(site), {**unmask, "question": fewer})["error"]
    # A new aggregation of the same trainings, in which one site less shares its keys, must not be unmasked.
    others = [name for name in active if name != fewer["dead"][0]]
    calls = {name: head["call"] for name, head in stages}
    head = {"run": unmask["run"], "aggregation": "000001-" + "0" * 32}

    def stage(name: str, questions: dict[str, Any]) -> dict[str, Any]:
        return {
            one: ask(100 + int(one), {**head, "client": one, "call": calls[one], "stage": name, "question": question})
            for one, question in questions.items()
        }

    keys = {one: reply["answer"] for one, reply in stage(Stage.SETUP, dict.fromkeys(others)).items()}
    shares = {one: reply["answer"] for one, reply in stage(Stage.SHARE_KEYS, dict.fromkeys(others, keys)).items()}
    forwarded = {to: {one: shares[one][to] for one in others if one != to} for to in others}
    stage(Stage.COLLECT_MASKED_VECTORS, forwarded)
    told = stage(Stage.UNMASK, {one: {"active": others, "dead": []} for one in others})
    assert all("in another sum already" in reply["error"] for reply in told.values())


def test_secrets_are_readable_by_the_sites_user_alone_and_go_when_they_are_used(recipe: str, tmp_path: Path) -> None:
    def look(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        if kind == "aggregate":
            files = list((tmp_path / "states").rglob(f"{site.site}/*.secagg"))
            assert all(file.stat().st_mode & 0o077 == 0 for file in files)
            secret = [name for file in files for name in json.loads(file.read_text())]
            assert ("key1" in secret) == (asked.head["stage"] != Stage.UNMASK)
        return reply

    run_sites(recipe, tmp_path, look, rounds=1)


def test_secrets_of_an_aggregation_that_was_broken_off_go_when_another_begins(recipe: str, tmp_path: Path) -> None:
    def kill(site: Any, kind: MessageKind, asked: Envelope, reply: Envelope) -> Envelope:
        if kind == "aggregate" and asked.head["stage"] == Stage.UNMASK:
            raise Killed
        return reply

    for _ in range(2):
        with pytest.raises(Killed):
            run_sites(recipe, tmp_path, kill, rounds=1)
        folders = [folder for folder in (tmp_path / "states").glob("*/*") if list(folder.glob("*.secagg"))]
        assert len(folders) == 4
        for folder in folders:
            assert len(list(folder.glob("*.secagg"))) == 1
            assert folder.stat().st_mode & 0o077 == 0
            folder.chmod(0o755)  # as an earlier version has made it


def test_masks_are_uniform_and_depend_on_all_of_the_seed() -> None:
    seeds = [bytes(32), b"\x01" + bytes(31), bytes(31) + b"\x01", b"\x01\x01" + bytes(30)]
    masks = [mask(seed, 1000) for seed in seeds]
    assert mask(seeds[0], 1000).equal(masks[0])
    assert all(not a.equal(b) for number, a in enumerate(masks) for b in masks[:number])
    # AES-256 with a key and a block of zeros (NIST, AESAVS).
    assert masks[0][:2].numpy().tobytes().hex() == "dc95c078a2408989ad48a21492842087"
    bits = np.unpackbits(masks[1].numpy().view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01
    assert [threshold(members) for members in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]


def test_flowers_own_generator_takes_few_of_a_keys_bits() -> None:
    """Why masks are not Flower's: it adds the words of a key up by XOR, and characters of base64 have 7 bits."""
    key = base64.urlsafe_b64encode(os.urandom(32))
    words = [key[start : start + 4] for start in range(0, len(key), 4)]
    other = b"".join(reversed(words))
    assert key != other
    assert all(byte < 128 for byte in key)
    assert np.array_equal(pseudo_rand_gen(key, 2**32, [(9,)]), pseudo_rand_gen(other, 2**32, [(9,)]))


def test_an_update_out_of_range_loses_a_client_with_the_same_records_in_a_simulation(
    recipe: str, tmp_path: Path
) -> None:
    narrow = "privacy.clipping_range=0.1"
    embedded(recipe, "fedavg", tmp_path / "one", 3, (*SECURE, narrow))
    run_sites(recipe, tmp_path, more=[narrow], rounds=3)
    assert records(tmp_path / "one") == records(tmp_path / "sites")
    found = [record["lost"] for record in records(tmp_path / "sites")]
    assert any("its site says: a change of" in reason for lost in found for reason in lost.values())


def test_sites_count_what_they_spent_on_an_update_out_of_range(recipe: str, tmp_path: Path) -> None:
    private = ["privacy.clipping_range=0.005", "privacy.noise_multiplier=1.0", "auxiliary.images_per_class=0"]
    with pytest.raises(RunError, match="too few sites"):
        run_sites(recipe, tmp_path, more=private, rounds=1)
    (record,) = records(tmp_path / "sites")
    lines = (next((tmp_path / "sites" / "trials").iterdir()) / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["privacy"] for line in lines] == [record["privacy"]]
    assert record["lost"].keys() == record["privacy"]["clients"].keys() == json.loads(lines[0])["ever"].keys()
    assert len([*(tmp_path / "states").rglob("ledger")]) == 4
