"""The files for Docker say what the deployment guide says. Nothing is built here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    named = set(found["volumes"])
    for service in found["services"].values():
        sources = {volume.split(":")[0] for volume in service.get("volumes", [])}
        assert {source for source in sources if not source.startswith(".")} <= named
        assert all((DEPLOY / source).is_file() for source in sources if source.startswith("."))
    return dict(found["services"])


def test_its_commands_are_those_of_the_guide(services: dict[str, Any]) -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text()
    told = [text for text in (service.get("command") for service in services.values()) if isinstance(text, str)]
    words = [word for text in [*told, (DEPLOY / "study.sh").read_text()] for word in shlex.split(text, comments=True)]
    flags = {word for word in words if word.startswith("--")}
    assert {"--enable-supernode-auth", "--auth-supernode-private-key", "--run-config"} <= flags
    assert all(flag in guide for flag in flags)


def test_each_site_has_its_own_key_and_part(services: dict[str, Any]) -> None:
    for number, site in enumerate("abc"):
        command = services[site]["command"]
        assert f"/site/{site}.key" in command
        assert f'site="{site}" partition-id={number} num-partitions=3' in command
        assert services[site]["volumes"] == [f"{site}:/site"], "no other site's key"
        assert services[site]["image"] == services["superlink"]["image"] == "fedkeep"


def test_only_the_proxy_is_reached(services: dict[str, Any]) -> None:
    assert "--host 127.0.0.1 --port 8001" in services["superlink"]["command"]
    assert services["proxy"]["network_mode"] == services["study"]["network_mode"] == "service:superlink"
    assert [name for name, service in services.items() if "ports" in service] == ["superlink"]


def test_what_it_copies_is_there() -> None:
    copied = [line.split()[1:-1] for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line[:5] == "COPY "]
    assert all((ROOT / path).exists() for paths in copied for path in paths)
