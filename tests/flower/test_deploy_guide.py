"""The commands of docs/deploy.md, word for word, as far as one machine can go; tests/hosts/run.py goes all the way."""

from __future__ import annotations

import re
import shlex
import socket
import tomllib
from pathlib import Path

import pytest

from fedkeep.cli import main
from fedkeep.flower.config import read_node_config, read_run_config
from fedkeep.reporting.run_folder import read_run

pytest.importorskip("flwr")

import federation as hosts
from flwr.common.config import parse_config_args

GUIDE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", GUIDE, flags=re.S | re.M)
LINES = [line for block in BLOCKS for line in block.splitlines()]


def starting(with_: str) -> list[str]:
    found = [line for line in LINES if line.startswith(with_)]
    assert found, f"the guide has no line that starts with {with_!r}"
    return found


def fedkeep(line: str) -> None:
    assert main(shlex.split(line, comments=True)[1:]) == 0, line


def after(flag: str, line: str) -> str:
    words = shlex.split(line)
    return words[words.index(flag) + 1]


def test_the_apps_can_be_made_and_take_what_the_run_lines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in starting("fedkeep flower new "):
        fedkeep(line)
    for line in starting("flwr run "):
        app = shlex.split(line)[2]
        project = tomllib.loads((tmp_path / app / "pyproject.toml").read_text())
        config = project["tool"]["flwr"]["app"]["config"]
        changes = parse_config_args([after("--run-config", line)]) if "--run-config" in line else {}
        assert changes.keys() <= config.keys(), "Flower lets a run change only what the file names"
        read_run_config(config | changes)


def test_the_keys_can_be_made_and_the_proxy_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = starting("fedkeep flower keys ")
    fedkeep(line)
    named = {word for line in LINES for word in shlex.split(line, comments=True) if word.startswith("keys/")}
    assert {"keys/ca.crt", "keys/superlink.key", "keys/a.pub"} <= named
    assert all((tmp_path / name).is_file() for name in named)
    (superlink,) = starting("flower-superlink ")
    behind = f"{after('--host', superlink)}:{after('--port', superlink)}"
    proxy = (Path(__file__).parents[2] / "docs" / "nginx.conf").read_text()
    assert f"server {behind};" in proxy
    assert {"keys/ca.crt", "keys/superlink.crt", "keys/superlink.key"} <= set(re.findall(r"keys/[a-z.]+", proxy))


def test_a_site_takes_the_node_config_of_the_guide() -> None:
    (line,) = (line for line in LINES if "--node-config" in line)
    node_config = read_node_config(parse_config_args([after("--node-config", line)]), {})
    assert (node_config.site, node_config.data, node_config.state_dir) == ("a", "/data/a", "/var/lib/fedkeep")


@pytest.mark.slow
def test_flowers_own_parsers_read_its_commands() -> None:
    """A renamed option of Flower would fail here first."""
    import typer
    from flwr.cli.app import app
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode

    flwr = typer.main.get_command(app)
    for line in starting("flwr "):
        words = shlex.split(line)[1:]
        command = flwr
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("flwr", words)
    for program, parser in (("flower-superlink", superlink()), ("flower-supernode", supernode())):
        lines = [line[line.index(program) :].split(";")[0] for line in LINES if f"{program} " in line]
        assert lines
        for line in lines:
            parser.parse_args(shlex.split(line)[1:])
    beside = re.findall(r"`--port (\d+)`", GUIDE)
    ports = [vars(supernode().parse_args(["--port", port]))["port"] for port in beside]
    assert len(set(ports)) == len(beside) > 1, "SuperNodes on one host have a port each"


@pytest.mark.slow
def test_the_trial_on_one_machine_runs(tmp_path: Path) -> None:
    """The block as it stands, in a shell, with the exports of the installation; Flower's port alone is another."""
    (trial,) = (block for block in BLOCKS if "flwr run local" in block)
    exports = starting("export ")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    with hosts.simulation(tmp_path, port) as host:
        message = host.run("/bin/sh", "-ec", "\n".join([*exports, trial]), timeout=1500)
    found = list((tmp_path / "simulation").glob("runs/recipe-*"))
    assert len(found) == 1, message
    assert all(trial.finished for trial in read_run(found[0]).trials), message
