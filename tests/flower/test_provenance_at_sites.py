"""Stored states, replies and data of another site, round or run, and code that was edited, are named at real sites."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from local_transport import LocalTransport, node_configs
from trial import Killed, config, killing

from fedkeep._utils.digests import Identity, seal, unseal
from fedkeep.errors import FedKeepError, RunError
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.server import serve

CALL = "000003-" + "0" * 32


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_recipe(tmp_path_factory.mktemp("recipe"))


def stop(
    recipe: str, folder: Path, method: str = "scaffold", after: int = 9, name: str = "run"
) -> dict[int, NodeConfig]:
    """Kill the server of a run in its second or third round, and return its sites."""
    nodes = node_configs(folder / "states")
    with pytest.raises(Killed):
        serve(LocalTransport(nodes, killing(9)), config(recipe, folder / name, methods=method, min_clients=1))
    return nodes


def states(folder: Path) -> dict[str, list[Path]]:
    """Return the stored states of each site that has one, the oldest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "states").rglob("*.state")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def lost(run: Path) -> str:
    return (run / "server.log").read_text()


@pytest.mark.parametrize("swapped", ["another site's", "an older round's"])
def test_a_state_of_another_site_or_round_under_the_right_name_is_not_used(
    swapped: str, recipe: str, tmp_path: Path
) -> None:
    nodes = stop(recipe, tmp_path)
    found = states(tmp_path)
    for site, files in found.items():
        if swapped == "another site's":
            other = next(name for name in found if name != site)
            content = found[other][-1].read_bytes()
        else:
            content = seal(
                tmp_path / "old", b"", Identity("SCAFFOLD", 0, site=site, call="000000" + CALL[6:])
            ).read_bytes()
        for file in files:
            file.write_bytes(content)
    serve(LocalTransport(nodes), config(recipe, tmp_path / "run", methods="scaffold", min_clients=1))
    said = lost(tmp_path / "run")
    assert "This client's state is lost" in said
    assert ("its site is" if swapped == "another site's" else "its round is 0, not") in said


def test_sealed_files_say_to_what_they_belong(tmp_path: Path) -> None:
    owner = Identity("FedAvg", 0, run="a" * 32, site="x", call=CALL)
    file = seal(tmp_path / "file", b"content", owner)
    assert unseal(file, owner) == unseal(file, Identity()) == b"content"
    for other, said in [
        (replace(owner, site="y"), "its site is x, not y"),
        (replace(owner, run="b" * 32), f"its run is {'a' * 32}, not {'b' * 32}"),
        (replace(owner, call="000004" + CALL[6:]), "its round is 3, not 4"),
        (replace(owner, call="000003-" + "1" * 32), f"its call is {CALL}, not 000003-"),
        (replace(owner, method="SFedKD", seed=1), "its method is FedAvg, not SFedKD, its seed is 0, not 1"),
    ]:
        with pytest.raises(RunError, match=said):
            unseal(file, other)
    for cut in (file.read_bytes()[:-1], b"", file.read_bytes()[:40]):
        file.write_bytes(cut)
        with pytest.raises(RunError, match="is damaged"):
            unseal(file, owner)


def test_a_site_that_comes_back_with_other_examples_is_not_taken(recipe: str, tmp_path: Path) -> None:
    nodes = stop(recipe, tmp_path, "fedavg")
    back = {
        900 + node: replace(other, site=nodes[node].site)
        for node, other in zip(nodes, [*nodes.values()][::-1], strict=True)
    }
    with pytest.raises(RunError, match="too few sites"):
        serve(LocalTransport(back), config(recipe, tmp_path / "run", methods="fedavg", min_clients=1))
    assert "examples, and had" in lost(tmp_path / "run")
    assert "start it with the data that it had then" in lost(tmp_path / "run")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_site_with_other_data_says_so_itself(method: str, recipe: str, tmp_path: Path) -> None:
    nodes = stop(recipe, tmp_path, method)
    shifted = {node: replace(site, partition_id=(site.partition_id + 1) % 8) for node, site in nodes.items()}
    serve(LocalTransport(shifted), config(recipe, tmp_path / "run", methods=method, min_clients=1))
    assert "begun with another data than there is now. Give this site the data and code" in lost(tmp_path / "run")


@pytest.mark.parametrize("name", ["sites.json", "checkpoint"])
def test_a_servers_files_of_another_trial_are_refused(name: str, recipe: str, tmp_path: Path) -> None:
    stop(recipe, tmp_path, "fedavg", name="other")
    nodes = stop(recipe, tmp_path, "fedavg")
    mine, other = (tmp_path / run / "trials" / "fedavg-seed0" / name for run in ("run", "other"))
    shutil.rmtree(mine) if mine.is_dir() else mine.unlink()
    shutil.copytree(other, mine) if other.is_dir() else shutil.copy(other, mine)
    with pytest.raises(FedKeepError, match="does not belong here: its run is"):
        serve(LocalTransport(nodes), config(recipe, tmp_path / "run", methods="fedavg", min_clients=1))
