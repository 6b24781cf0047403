"""Four hosts, and all that may go wrong: `python tests/hosts/run.py` (as root, on Linux, with the extra 'flower').

Each host is a network namespace with an address of its own. SFedKD runs on Fashion-MNIST over TLS with authenticated
nodes. Meanwhile a SuperNode, the server app and the SuperLink are killed and started again, strangers try to join, and
a site sends what is not finite and what has the wrong shape. Ends with a list of what was seen, and code 1 if anything
was not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from federation import Federation, command_of, descendants, federation, kill_all, wait_for

SITES = ["a", "b", "c"]
ROUNDS = 4
NAN_ROUND, SHAPE_ROUND = 3, 4

SPOILING_APP = '''\
"""The app that `fedkeep flower new` writes, with a site that sends bad updates where a test asks it to."""

import json
import os

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedkeep.flower import apps
from fedkeep.flower.transport import Envelope
from fedkeep.flower.apps import server
from fedkeep.flower.apps import pack, unpack

__all__ = ["client", "server"]
client = ClientApp()
client.query("introduce")(apps.introduce)


@client.train("perform")
def perform(message, context):
    reply = apps.perform(message, context)
    request = unpack(message.content, float("inf")).head["request"]
    how = json.loads(os.environ.get("SPOIL", "{}")).get(str(request["round"]))
    if how is None or request["step"] != "train":
        return reply
    envelope = unpack(reply.content, float("inf"))
    name = next(iter(envelope.tensors))
    bad = envelope.tensors[name] * torch.nan if how == "nan" else torch.zeros(3, 5)
    return Message(pack(Envelope(envelope.head, {**envelope.tensors, name: bad})), reply_to=message)
'''


class Log:
    """Prints what happens, with the time, and remembers whether it was as it should be."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.good = True

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def check(self, what: str, holds: Any) -> None:
        self.good = self.good and bool(holds)
        self.say(f"{'ok    ' if holds else 'FAILED'} {what}")


def read_records(out: Path) -> list[dict[str, Any]]:
    """Return the finished rounds of a run folder with one trial."""
    files = list(out.glob("trials/*/rounds.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Trial:
    """The run that is disturbed."""

    def __init__(self, hosts: Federation, data: Path, log: Log) -> None:
        self.hosts = hosts
        self.data = data
        self.log = log
        self.app = hosts.folder / "app"
        self.out = hosts.folder / "out"
        self.run: Any = None

    def records(self) -> list[dict[str, Any]]:
        return read_records(self.out)

    def until_round(self, number: int) -> None:
        def reached() -> bool:
            if self.run.poll() is not None and len(self.records()) < ROUNDS:
                raise RuntimeError(f"the run ended early:\n{self.hosts.link.log('run.log')[-3000:]}")
            return len(self.records()) >= number

        wait_for(f"round {number}", reached, 240)
        self.log.say(f"round {number} of {ROUNDS} is done")

    def start(self) -> None:
        self.run = self.hosts.start_run(self.app, f'out="{self.out}"')

    def again(self) -> None:
        """Start the run again, which goes on where it stopped."""
        self.run.kill()
        self.run.wait()
        self.start()

    def node(self, site: str) -> None:
        source = self.hosts.folder / "data" / site
        self.hosts.start_supernode(site, f'site="{site}" data="{source}" state-dir="states"')


def prepare(trial: Trial) -> None:
    """Make keys, the app, and each site's own data: Parquet files with some rows of Fashion-MNIST."""
    import pyarrow.parquet as parquet

    hosts = trial.hosts
    hosts.make_keys(SITES)
    changes = ["training.epochs=2", "training.lr=0.05", "run.min_clients=2", "run.evaluate_every=1"]
    sets = [word for change in changes for word in ("--set", change)]
    recipe = ("--recipe", "sfedkd/table1/fashion-mnist-2-0.5", "--methods", "sfedkd", "--seeds", "0")
    new = ("fedkeep", "flower", "new", str(trial.app), *recipe, "--rounds", str(ROUNDS), "--sites", "3")
    hosts.link.run(*new, *sets)
    (trial.app / "fedkeep_app.py").write_text(SPOILING_APP)
    config = (trial.app / "pyproject.toml").read_text()
    config = config.replace("deadline = 3600.0", "deadline = 120.0").replace("wait = 600.0", "wait = 120.0")
    (trial.app / "pyproject.toml").write_text(config)
    node_config = trial.data / "zalando-datasets" / "fashion_mnist"
    train, test = (parquet.read_table(node_config / f"{split}.parquet") for split in ("train", "test"))
    for number, site in enumerate(SITES):
        folder = hosts.folder / "data" / site
        folder.mkdir(parents=True)
        parquet.write_table(train.slice(1500 * number, 1500), folder / "train.parquet")
        parquet.write_table(test.slice(0, 100), folder / "test.parquet")
    hosts.link.environment["FEDKEEP_DATA"] = str(trial.data)
    hosts.sites["c"].environment["SPOIL"] = json.dumps({NAN_ROUND: "nan", SHAPE_ROUND: "shape"})


def intrude(trial: Trial) -> None:
    """Let two strangers try to join: one without a key, one with a key that nobody registered."""
    hosts = trial.hosts
    hosts.make_keys(["thief"], "stolen")
    config = 'site="a" partition-id=0 num-partitions=3'
    hosts.add("nobody")
    hosts.start_supernode("nobody", config, keys=None, again=False)
    hosts.add("thief")
    hosts.start_supernode("thief", config, keys="stolen", again=False)


def check_intruders(trial: Trial) -> None:
    hosts, log = trial.hosts, trial.log
    for name in ("nobody", "thief"):
        host = hosts.hosts[name]
        output = host.log()
        reason = next((line.strip() for line in output.splitlines() if line.startswith("[code:")), "")
        log.check(f"{name} was not let in: {reason[:150]}", "SuperNode ID" not in output and reason)
        host.kill()
    log.check("three nodes are online", hosts.online() == 3)
    thief = hosts.hosts["thief"]
    hosts.connect(thief, hosts.superlink)
    output = thief.run("flwr", "supernode", "register", str(hosts.folder / "stolen" / "thief.pub"), check=False)
    log.check("the thief cannot register its key itself", "registered" not in output)
    log.check("the proxy's log says so", "/v1/control" in (hosts.folder / "nginx-refused.log").read_text())


def disturb(trial: Trial) -> None:
    """Run, and disturb the run."""
    hosts, log = trial.hosts, trial.log
    hosts.start_superlink()
    hosts.start_proxy()
    for site in SITES:
        hosts.register(site)
    for site in SITES:
        trial.node(site)
    log.say("the SuperLink and three SuperNodes are started")
    intrude(trial)
    wait_for("three nodes", lambda: hosts.online() == 3, 90)
    trial.start()
    trial.until_round(1)
    check_intruders(trial)
    hosts.sites["b"].crash()
    log.say("SuperNode b was killed, in round 2, and is started again by its loop")
    trial.until_round(2)
    server = [pid for pid in descendants(hosts.link.process.pid) if "flwr-serverapp" in command_of(pid)]
    kill_all(server)
    log.check("the server app was killed, in round 3", server)
    trial.again()
    trial.until_round(NAN_ROUND)
    hosts.link.kill()
    log.say("the SuperLink was killed, and its server app with it, in round 4")
    hosts.start_superlink()
    log.say("the SuperLink is up again")
    trial.again()
    trial.until_round(ROUNDS)
    wait_for("the run to end", lambda: trial.run.poll() is not None, 60)


def judge(trial: Trial) -> None:
    """Check what the run left."""
    log, records = trial.log, trial.records()
    text = (trial.out / "server.log").read_text()
    numbers = [record["round"] for record in records]
    log.check(f"rounds {numbers}, each once", numbers == list(range(1, ROUNDS + 1)))
    log.check("the run is finished", list(trial.out.glob("trials/*/result.json")))
    log.check("no round was undone", not any(record["rolled_back"] for record in records))
    nan, shape = (records[number - 1]["lost"].get("c", "") for number in (NAN_ROUND, SHAPE_ROUND))
    log.check(f"NaN refused: {nan}", "not finite" in nan and nan in text)
    log.check(f"wrong shape refused: {shape}", "shape" in shape and shape in text)
    others = {site for record in records for site in record["lost"]} - {"c"}
    log.say(f"lost besides: {[record['lost'] for record in records] if others else 'nobody'}")
    accuracy = [sum(record["correct"]) / 10_000 for record in records]
    log.check(f"accuracy over the rounds: {[f'{value:.3f}' for value in accuracy]}", accuracy[-1] > 0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data-dir", default=os.environ.get("FEDKEEP_DATA"), help="folder that holds Fashion-MNIST")
    options.add_argument("--keep", metavar="DIR", help="leave logs and results there")
    chosen = options.parse_args(arguments)
    if not chosen.data_dir:
        options.error("name the folder that holds Fashion-MNIST with --data-dir or FEDKEEP_DATA")
    folder = Path(chosen.keep or tempfile.mkdtemp(prefix="fedkeep-hosts-")).resolve()
    log = Log()
    with federation(folder, SITES, namespaces=True) as hosts:
        trial = Trial(hosts, Path(chosen.data_dir).resolve(), log)
        try:
            prepare(trial)
            log.say("keys, the app and each site's data are made")
            disturb(trial)
            judge(trial)
        except (OSError, RuntimeError, TimeoutError) as error:
            log.check(f"{type(error).__name__}: {error}", False)
    log.check("it took less than 10 minutes", time.monotonic() - log.began < 600)
    if not chosen.keep and log.good:
        shutil.rmtree(folder)
    else:
        log.say(f"logs: {folder}")
    return 0 if log.good else 1


if __name__ == "__main__":
    sys.exit(main())
