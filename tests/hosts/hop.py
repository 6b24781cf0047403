"""What a hop costs beyond local training: `python tests/hosts/hop.py` (with the extra 'flower').

FedSeq on digits, two sites on this machine behind a SuperLink with TLS, node authentication and the proxy. Every call
is timed at six points, and the medians are printed as a Markdown table.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

from federation import QUIET, federation, wait_for

ROUNDS = 6
SITES = ["0", "1"]
TIMED_APP = '''\
"""The app that `fedkeep flower new` writes, with a clock."""

import json
import os
import time
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedkeep.flower import apps
from fedkeep.flower.apps import server

__all__ = ["client", "server"]
TIMES = Path(os.environ["TIMES"])
calls = {}
client = ClientApp()
client.query("introduce")(apps.introduce)


def note(what, call, **more):
    line = json.dumps({"what": what, "call": call, "at": time.time(), **more}) + "\\n"
    with (TIMES / f"{what}-{os.getpid()}").open("a") as file:
        file.write(line)


def process_start():
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


@client.train("perform")
def perform(message, context):
    call = apps.unpack(message.content, float("inf")).head["call"]
    note("entered", call, started=process_start())
    reply = apps.perform(message, context)
    answer = apps.unpack(reply.content, float("inf")).head["answer"]["tuple"]
    note("left", call, train=answer[1] + answer[2])
    return reply


send, receive = apps.FlowerTransport.send, apps.FlowerTransport.receive


def timed_send(self, node, kind, envelope, round, seconds):
    if kind == "perform":
        note("asked", envelope.head["call"])
    number = send(self, node, kind, envelope, round, seconds)
    if kind == "perform":
        calls[number] = envelope.head["call"]
        note("pushed", envelope.head["call"])
    return number


def timed_receive(self, sent):
    found = receive(self, sent)
    for number in found:
        if number in calls:
            note("received", calls[number])
    return found


apps.FlowerTransport.send, apps.FlowerTransport.receive = timed_send, timed_receive
'''


def measure(folder: Path) -> list[dict[str, float]]:
    """Run, and return the seconds of each call by where they went; the first round is left out."""
    times = folder / "times"
    times.mkdir()
    with federation(folder, SITES, port=8700) as result:
        result.make_keys(SITES)
        app, out = folder / "app", folder / "out"
        words = ("--sites", "2", "--methods", "fedseq", "--seeds", "0", "--rounds", str(ROUNDS))
        result.link.run("fedkeep", "flower", "new", str(app), *words, "--set", "partition.classes_per_client=6")
        (app / "fedkeep_app.py").write_text(TIMED_APP)
        result.link.environment["TIMES"] = str(times)
        result.start_superlink()
        result.start_proxy()
        for name in SITES:
            result.register(name)
            result.sites[name].environment["TIMES"] = str(times)
            result.start_supernode(name, f"partition-id={name} num-partitions=2")
        wait_for("two nodes", lambda: result.online() == 2, 120)
        result.start_run(app, f'out="{out}"').wait(timeout=900)
        if not (out / "report.html").is_file():
            raise RuntimeError(result.link.log("run.log"))
    seen: dict[str, dict[str, dict[str, float]]] = {}
    for file in times.iterdir():
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            seen.setdefault(entry["call"], {})[entry["what"]] = entry
    return [split(call) for name, call in seen.items() if not name.startswith("000001-")]


def split(call: dict[str, dict[str, float]]) -> dict[str, float]:
    at = {what: entry["at"] for what, entry in call.items()}
    train, started = call["left"]["train"], call["entered"]["started"]
    return {
        "server packs and pushes to the SuperLink": at["pushed"] - at["asked"],
        "SuperNode fetches it and starts a process (idle: looks every 3 s)": started - at["pushed"],
        "process imports PyTorch, Flower and FedKeep, and takes the message": at["entered"] - started,
        "site reads its data and state, checks, writes the answer down": at["left"] - at["entered"] - train,
        "answer travels back and is seen": at["received"] - at["left"],
        "whole hop beyond training": at["received"] - at["asked"] - train,
        "local training": train,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls = measure(Path(folder))
    load = os.getloadavg()[1]
    poll = QUIET["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
    print(f"{len(calls)} calls, {os.cpu_count()} cores, load average {load:.1f}, process poll {poll} s\n")
    print("| where the time goes | median s | least s | most s |\n|:--|--:|--:|--:|")
    for part in calls[0]:
        values = [call[part] for call in calls]
        print(f"| {part} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
