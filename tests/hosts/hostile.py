"""Hostile sites among honest ones: `python tests/hosts/hostile.py` (as root, on Linux, with the extra `flower`).

Each host is a network namespace. FedAvg runs on digits. One site multiplies its updates, one sends its first answer
again in every later round, one sends far too much and opens 1,000 connections that say nothing; meanwhile the server's
host is rebooted. The model must equal, bit for bit, that of the honest answers alone, computed in this process.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from federation import Federation, descendants, federation, kill_all, wait_for
from run import Log, read_records
from safetensors.torch import load_file

from fedkeep.flower.client_handler import handle_message
from fedkeep.flower.config import NodeConfig, RunConfig
from fedkeep.flower.server import serve
from fedkeep.flower.transport import Envelope, MessageKind
from fedkeep.rounds.messages import Fault, no_reply

SITES = ["0", "1", "2", "3", "4"]
LYING, REPLAYING, FLOODING = "2", "3", "4"
ROUNDS = 3

APP = '''\
"""The app that `fedkeep flower new` writes, with sites that attack where a test asks them to."""

import os
from pathlib import Path

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedkeep.flower import apps
from fedkeep.flower.apps import pack, unpack
from fedkeep.flower.apps import server
from fedkeep.flower.transport import Envelope

__all__ = ["client", "server"]
client = ClientApp()
client.query("introduce")(apps.introduce)


@client.train("perform")
def perform(message, context):
    how, kept = os.environ.get("HOSTILE", ""), Path(os.environ.get("KEPT", "kept.bin"))
    reply = apps.perform(message, context)
    if not how:
        return reply
    envelope = unpack(reply.content, float("inf"))
    tensors = dict(envelope.tensors)
    if how == "lying":
        tensors = {name: 1e6 * tensor for name, tensor in tensors.items()}
    if how == "flooding":
        tensors = {name: torch.rand(15_000_000) for name in tensors}
    if how == "replaying":
        if kept.exists():
            from safetensors.torch import load_file
            import json
            old = load_file(kept)
            head = json.loads(kept.with_suffix(".json").read_text())
            return Message(pack(Envelope(head, old)), reply_to=message)
        from safetensors.torch import save_file
        import json
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, kept)
        kept.with_suffix(".json").write_text(json.dumps(envelope.head))
    return Message(pack(Envelope(envelope.head, tensors)), reply_to=message)
'''

FLOOD = """\
import socket, sys, time
host, port = sys.argv[1].split(":")
held = []
for _ in range(1000):
    try:
        held.append(socket.create_connection((host, int(port)), timeout=2))
    except OSError:
        pass
print("connected", len(held), flush=True)
time.sleep(600)
"""


class HonestAlone:
    """The same sites in this process: hostile ones fail, but for the first answer of the one that replays it."""

    def __init__(self, folder: Path) -> None:
        self.places = {
            number: NodeConfig(site=site, partition_id=number, num_partitions=len(SITES), state_dir=str(folder / site))
            for number, site in enumerate(SITES)
        }
        self.waiting: dict[str, Envelope | Fault] = {}

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(self.places, "")

    def send(self, node: int, kind: MessageKind, envelope: Envelope, round: int, seconds: float) -> str:
        site, name = self.places[node].site, str(len(self.waiting)) + f"-{node}-{time.monotonic_ns()}"
        fails = kind == "perform" and (site in (LYING, FLOODING) or (site == REPLAYING and round > 1))
        self.waiting[name] = no_reply("hostile") if fails else handle_message(kind, envelope, self.places[node])
        return name

    def receive(self, message_ids: Any) -> dict[str, Envelope | Fault]:
        return {name: self.waiting.pop(name) for name in list(message_ids) if name in self.waiting}


def attack(hosts: Federation, log: Log, app: Path, out: Path) -> None:
    """Run with hostile sites, and reboot the server's host after the first round."""
    hosts.start_superlink()
    hosts.start_proxy()
    for site in SITES:
        hosts.register(site)
    for site, how in ((LYING, "lying"), (REPLAYING, "replaying"), (FLOODING, "flooding")):
        kept = hosts.hosts[site].folder / "kept.safetensors"
        hosts.hosts[site].environment |= {"HOSTILE": how, "KEPT": str(kept)}
    for number, site in enumerate(SITES):
        config = f'site="{site}" partition-id={number} num-partitions={len(SITES)} state-dir="states"'
        hosts.start_supernode(site, config)
    wait_for("five nodes", lambda: hosts.online() == len(SITES), 180)
    log.say("five sites are online")
    script = hosts.folder / "flood.py"
    script.write_text(FLOOD)
    flooder = hosts.hosts[FLOODING].start("python", str(script), hosts.superlink, log="flood.log")
    wait_for("the flood", lambda: "connected" in hosts.hosts[FLOODING].log("flood.log"), 120)
    log.say(f"site {FLOODING} floods the proxy: {hosts.hosts[FLOODING].log('flood.log').strip()}")
    run = hosts.start_run(app, f'out="{out}"')
    wait_for("round 1", lambda: read_records(out) or run.poll() is not None, 400)
    log.check("round 1 is done", read_records(out))
    hosts.link.kill()
    hosts.proxy.kill()
    run.kill()
    run.wait()
    log.say("the server's host was rebooted: SuperLink, proxy and server app are killed")
    hosts.start_superlink()
    hosts.start_proxy()
    run = hosts.start_run(app, f'out="{out}"')
    wait_for("the run to end", lambda: run.poll() is not None, 500)
    kill_all([flooder.pid, *descendants(flooder.pid)])


def judge(log: Log, out: Path, alone: Path) -> None:
    """Compare the run with that of the honest answers alone."""
    records = read_records(out)
    log.check(f"{len(records)} rounds, each once", [record["round"] for record in records] == [1, 2, 3])
    for record in records:
        expected = {LYING, FLOODING} | ({REPLAYING} if record["round"] > 1 else set())
        log.check(f"round {record['round']}: lost {record['lost']}", set(record["lost"]) == expected)
    ours, theirs = (load_file(next(folder.glob("trials/*/model.safetensors"))) for folder in (out, alone))
    same = ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
    log.check("the model is that of the honest answers alone, bit for bit", same)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--keep", metavar="DIR", help="leave logs and results there")
    chosen = options.parse_args(arguments)
    folder = Path(chosen.keep or tempfile.mkdtemp(prefix="fedkeep-hostile-")).resolve()
    log, app, out = Log(), folder / "app", folder / "out"
    with federation(folder, SITES, namespaces=True) as hosts:
        try:
            hosts.make_keys(SITES)
            changes = ["run.min_clients=2", "run.evaluate_every=1", "training.lr=0.05"]
            words = ("--recipe", "demo", "--methods", "fedavg", "--seeds", "0", "--rounds", str(ROUNDS), "--sites", "5")
            sets = [word for change in changes for word in ("--set", change)]
            hosts.link.run("fedkeep", "flower", "new", str(app), *words, *sets)
            (app / "fedkeep_app.py").write_text(APP)
            config = (app / "pyproject.toml").read_text()
            config = config.replace("deadline = 3600.0", "deadline = 150.0").replace("wait = 600.0", "wait = 150.0")
            (app / "pyproject.toml").write_text(config.replace("largest-reply = 1000.0", "largest-reply = 20.0"))
            alone = RunConfig(recipe=str(app / "recipe.toml"), out=str(folder / "alone"), sites=len(SITES), wait=5.0)
            serve(HonestAlone(folder / "states"), alone)
            log.say("the honest answers alone are computed")
            attack(hosts, log, app, out)
            judge(log, out, folder / "alone")
        except (OSError, RuntimeError, TimeoutError, StopIteration) as error:
            log.check(f"{type(error).__name__}: {error}", False)
    if not chosen.keep and log.good:
        shutil.rmtree(folder)
    else:
        log.say(f"logs: {folder}")
    return 0 if log.good else 1


if __name__ == "__main__":
    sys.exit(main())
