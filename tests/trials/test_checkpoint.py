"""Checkpoints and trial folders: whole or not there, whatever strikes in between."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
from torch import Tensor

from fedkeep._utils import digests
from fedkeep._utils.digests import Digest
from fedkeep._utils.files import atomic_write
from fedkeep.aggregation import weighted_mean
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.interface.codec import encode
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights, get_architecture
from fedkeep.trials import checkpoint as module
from fedkeep.trials.callbacks import Callback, OnRoundEnd
from fedkeep.trials.checkpoint import Checkpoint, load_manifest, manifests
from fedkeep.trials.trial import JsonlWriter, run_trial


@dataclass
class Own:
    trainings: int = 0
    model: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Remembering(Algorithm[NoState, Own]):
    """Sequential training in which each client keeps its last model."""

    title = "checkpoint probe"

    def round(self, server: Server, cohort: Cohort) -> None:
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model

    @on_client
    def train(self, client: Client[Own], model: dict[str, Tensor]) -> Fit:
        fit = client.fit(client.state.model or model, CrossEntropy())
        client.state.model, client.state.trainings = dict(fit.model), client.state.trainings + 1
        return fit


class Killed(BaseException):
    pass


def kill(at: int) -> Callback:
    def strike(state: Any, result: Any) -> None:
        if result.record["round"] == at:
            raise Killed

    return OnRoundEnd(strike)


def killed(algorithm: Algorithm[Any, Any], folder: Path, at: int = 2) -> Path:
    with pytest.raises(Killed):
        run_trial(tiny.simulation(algorithm), folder, [kill(at)])
    return folder


def saved_round(folder: Path) -> int:
    return load_manifest(folder / "checkpoint" / manifests(folder / "checkpoint")[0]).round


def states(simulation: Any) -> dict[str, bytes]:
    return {client: encode(state) for client, state in sorted(simulation.client_states.items())}


def test_only_what_changed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, written = tiny.simulation(Remembering(), cohort_size=2, rounds=9), []
    monkeypatch.setattr(
        module, "atomic_write", lambda path, content, **sync: written.append(path.name) or atomic_write(path, content)
    )
    checkpoint = Checkpoint(tmp_path)
    for number in range(1, 6):
        cohort = tiny.run_rounds(simulation, 1)[0]["cohort"]
        written.clear()
        checkpoint.save(simulation, {})
        clients = [f"client-{client}-{number}.safetensors" for client in sorted(cohort)]
        assert written == [*clients, *(f"{name}-{number}.safetensors" for name in ("server", "kept"))]
        last = [load_manifest(tmp_path / name) for name in manifests(tmp_path)]
        assert [manifest.round for manifest in last] == [number, number - 1][:number], "the last two are kept"
        on_disk = {path.name for path in tmp_path.iterdir()}
        assert on_disk == {name for manifest in last for name in (manifest.name, *manifest.files)}
    fresh = tiny.simulation(Remembering(), cohort_size=2, rounds=9)
    checkpoint.restore(fresh)
    assert states(fresh) == states(simulation)
    assert fresh.finished == 5


@pytest.mark.parametrize("algorithm", [Remembering(), SFedKD()], ids=["remembering", "sfedkd"])
def test_a_save_that_is_cut_short_at_any_write_loses_nothing(
    algorithm: Algorithm[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of round 1 stands until that of round 2 is whole; and saving once more works."""
    for cut in range(1, 9):
        folder = tmp_path / str(cut)
        simulation = tiny.simulation(algorithm)
        checkpoint = Checkpoint(folder)
        tiny.run_rounds(simulation, 1)
        checkpoint.save(simulation, {"at": Digest(1, "")})
        reference = states(simulation)
        tiny.run_rounds(simulation, 1)
        writes: list[str] = []

        def failing(path: Path, content: Any, cut: int = cut, writes: list[str] = writes, **sync: Any) -> None:
            writes.append(path.name)
            if len(writes) == cut:
                raise KeyboardInterrupt
            atomic_write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(module, "atomic_write", failing)
            patch.setattr(digests, "atomic_write", failing)
            try:
                checkpoint.save(simulation, {"at": Digest(2, "")})
            except KeyboardInterrupt:
                fresh = tiny.simulation(algorithm)
                assert Checkpoint(folder).restore(fresh) == {"at": Digest(1, "")}
                assert states(fresh) == reference
        checkpoint.save(simulation, {"at": Digest(3, "")})
        fresh = tiny.simulation(algorithm)
        assert Checkpoint(folder).restore(fresh) == {"at": Digest(3, "")}
        assert states(fresh) == states(simulation)


def test_an_interrupt_while_saving_still_saves_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trial(tiny.simulation(SFedKD()), tmp_path / "whole")
    interrupted = []

    def once(path: Path, content: Any, **sync: Any) -> None:
        if not interrupted and path.name.startswith("server-2"):
            interrupted.append(path)
            raise KeyboardInterrupt
        atomic_write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(module, "atomic_write", once)
        with pytest.raises(KeyboardInterrupt):
            run_trial(tiny.simulation(SFedKD()), tmp_path / "cut", checkpoint_share=1e9)  # due after every round
    assert saved_round(tmp_path / "cut") == 2
    run_trial(tiny.simulation(SFedKD()), tmp_path / "cut")
    assert (tmp_path / "cut" / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()


@pytest.mark.parametrize("file", ["rounds.jsonl", "timings.jsonl"])
@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_between_a_round_and_its_records_loses_nothing(
    file: str, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trial(tiny.simulation(SFedKD()), tmp_path / "whole")
    write, interrupted = JsonlWriter.write, []

    def once(log: JsonlWriter, line: dict[str, Any]) -> None:
        strikes = not interrupted and line["round"] == 2 and Path(log.file.name).name == file
        interrupted.extend([file] if strikes else [])
        if not (strikes and before):
            write(log, line)
        if strikes:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", once)
        with pytest.raises(KeyboardInterrupt):
            run_trial(tiny.simulation(SFedKD()), tmp_path / "cut")
    assert saved_round(tmp_path / "cut") == 2
    run_trial(tiny.simulation(SFedKD()), tmp_path / "cut")
    assert (tmp_path / "cut" / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()
    rounds = [json.loads(line)["round"] for line in (tmp_path / "cut" / "timings.jsonl").read_text().splitlines()]
    assert rounds == sorted(set(rounds))


def test_leftovers_of_a_kill_while_writing_are_cleared(tmp_path: Path) -> None:
    simulation = tiny.simulation(SFedKD())
    tiny.run_rounds(simulation, 1)
    tmp_path.joinpath(".server-7.safetensors.12345.tmp").write_bytes(b"half")
    tmp_path.joinpath("server-7.safetensors").write_bytes(b"never named")
    Checkpoint(tmp_path).save(simulation, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kept-1.safetensors",
        "manifest-1.json",
        "server-1.safetensors",
    ]


@dataclass
class Past:
    models: list[Weights] = field(default_factory=list)


class Recalling(Algorithm[Past]):
    """The server keeps models that it also sends."""

    def round(self, server: Server[Any], cohort: Cohort) -> None:
        server.model = weighted_mean(cohort.ask(self.recall, server.model, server.state.models))
        server.state.models = [*server.state.models, server.model][-2:]

    @on_client
    def recall(self, client: Client, model: Weights, past: list[Weights]) -> Fit:
        return client.fit(model, CrossEntropy())


def test_a_tensor_that_a_server_keeps_twice_is_sent_once_after_a_resume_too(tmp_path: Path) -> None:
    whole = tiny.run_rounds(tiny.simulation(Recalling(), rounds=3))
    simulation = tiny.simulation(Recalling(), rounds=3)
    tiny.run_rounds(simulation, 2)
    Checkpoint(tmp_path).save(simulation, {})
    restored = tiny.simulation(Recalling(), rounds=3)
    Checkpoint(tmp_path).restore(restored)
    assert [record["down"] for record in tiny.run_rounds(restored)] == [whole[2]["down"]]


def test_restoring_into_a_used_simulation_forgets_what_it_was(tmp_path: Path) -> None:
    simulation = tiny.simulation(Remembering())
    tiny.run_rounds(simulation, 1)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(simulation, {})
    tiny.run_rounds(simulation, 2)
    checkpoint.restore(simulation)
    checkpoint.save(simulation, {})  # must not look for clients that changed in a future now forgotten
    fresh = tiny.simulation(Remembering())
    Checkpoint(tmp_path).restore(fresh)
    assert tiny.run_rounds(fresh) == tiny.run_rounds(tiny.simulation(Remembering()))[1:]


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "3", "null", '{"format": 1}', '{"format": 99}', "\0" * 20])
def test_a_damaged_manifest_is_a_clear_error(content: str, tmp_path: Path) -> None:
    folder = killed(SFedKD(), tmp_path / "cell")
    for name in manifests(folder / "checkpoint"):
        (folder / "checkpoint" / name).write_text(content)
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole: .*manifest-2\.json is damaged"):
        run_trial(tiny.simulation(SFedKD()), folder)


@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "swap"])
@pytest.mark.parametrize("name", ["server", "client"])
def test_a_damaged_checkpoint_file_is_a_clear_error(damage: str, name: str, tmp_path: Path) -> None:
    folder = killed(Remembering(), tmp_path / "cell")
    for path in (folder / "checkpoint").glob(f"{name}-*.safetensors"):
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "swap":
            path.write_bytes(encode({"x": 1}))
        else:
            path.write_bytes(
                content[: len(content) // 2] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1])
            )
    with pytest.raises(RunError, match=rf"no checkpoint .* is whole: .*{name}-.* (is damaged|is missing): expected"):
        run_trial(tiny.simulation(Remembering()), folder)


def test_the_checkpoint_before_is_taken_where_the_last_one_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_trial(tiny.simulation(Remembering()), tmp_path / "whole")
    with pytest.raises(Killed):
        run_trial(tiny.simulation(Remembering()), tmp_path / "cut", [kill(3)], checkpoint_share=1e9)
    path = tmp_path / "cut" / "checkpoint" / "server-3.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    run_trial(tiny.simulation(Remembering()), tmp_path / "cut")
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "server-3.safetensors is damaged: expected" in warning
    assert "goes on from its checkpoint of round 2" in warning
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_of_another_model_or_method_is_refused(tmp_path: Path) -> None:
    folder = killed(SFedKD(), tmp_path / "cell")
    other = lambda: get_architecture("mlp")(hidden=(9,)).build(tiny.SHAPE, tiny.CLASSES)  # type: ignore[call-arg]  # noqa: E731
    with pytest.raises(RunError, match=r"another model.*shape"):
        run_trial(tiny.simulation(SFedKD(), factory=other), folder)
    with pytest.raises(RunError, match="NoState"):
        run_trial(tiny.simulation(FedAvg()), folder)


def test_records_shorter_than_the_checkpoint_are_a_clear_error(tmp_path: Path) -> None:
    """As after a power failure: the checkpoint was forced to disk. Padding the file with NULs would hide the loss."""
    for name in ("rounds.jsonl", "timings.jsonl"):
        folder = killed(SFedKD(), tmp_path / name)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 3])
        with pytest.raises(RunError, match=rf"{name} is damaged"):
            run_trial(tiny.simulation(SFedKD()), folder)
        assert b"\0" not in (folder / name).read_bytes()


def test_records_are_on_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    forced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        forced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    run_trial(tiny.simulation(FedAvg(), rounds=1), tmp_path)
    manifest = next(location for location, name in enumerate(forced) if "manifest" in name)
    assert "rounds.jsonl" in forced[:manifest]


def test_new_names_are_on_disk_before_old_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    unsafe: set[Path] = set()  # folders with a new name that a power failure could take back
    removed, renamed = list[str](), list[str]()
    replace, unlink = os.replace, os.unlink

    def on_fsync(descriptor: int) -> None:
        unsafe.discard(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def on_replace(source: Any, target: Any) -> None:
        replace(source, target)
        renamed.append(Path(target).name)
        assert "manifest" not in renamed[-1] or not unsafe, "it lists files whose names are on disk"
        unsafe.add(Path(target).parent.resolve())

    def on_unlink(path: Any, **options: Any) -> None:
        unlink(path, **options)
        if not Path(path).name.endswith(".tmp"):
            removed.append(Path(path).name)
            assert Path(path).parent.resolve() not in unsafe, f"{path} went before its successor was safe"

    monkeypatch.setattr(os, "fsync", on_fsync)
    monkeypatch.setattr(os, "replace", on_replace)
    monkeypatch.setattr(os, "unlink", on_unlink)
    simulation, checkpoint = tiny.simulation(SFedKD(), rounds=4), Checkpoint(tmp_path)
    for _ in range(4):
        simulation.run_round()
        checkpoint.save(simulation, {})
    assert not unsafe, "all names are on disk in the end"
    assert any("manifest" in name for name in renamed)
    assert any("manifest" in name for name in removed), "older checkpoints were removed meanwhile"


def test_a_broken_last_line_is_cut_off(tmp_path: Path) -> None:
    run_trial(tiny.simulation(SFedKD()), tmp_path / "whole")
    folder = killed(SFedKD(), tmp_path / "cell")
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(b'{"task":1,"rou')
    run_trial(tiny.simulation(SFedKD()), folder)
    assert (folder / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()


def test_killed_before_the_first_checkpoint_it_starts_again(tmp_path: Path) -> None:
    run_trial(tiny.simulation(SFedKD()), tmp_path / "whole")
    folder = tmp_path / "cell"
    folder.mkdir()
    (folder / "rounds.jsonl").write_bytes((tmp_path / "whole" / "rounds.jsonl").read_bytes()[:300])
    run_trial(tiny.simulation(SFedKD()), folder)
    assert (folder / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()


def test_killed_after_the_last_round_only_the_result_is_written(tmp_path: Path) -> None:
    run_trial(tiny.simulation(SFedKD()), tmp_path)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    model = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "result.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    simulation = tiny.simulation(SFedKD())
    run_trial(simulation, tmp_path, [OnRoundEnd(lambda state, result: pytest.fail("a round was run"))])
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    assert (tmp_path / "model.safetensors").read_bytes() == model


def test_a_moved_folder_resumes(tmp_path: Path) -> None:
    run_trial(tiny.simulation(SFedKD()), tmp_path / "whole")
    killed(SFedKD(), tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    run_trial(tiny.simulation(SFedKD()), tmp_path / "there")
    assert (tmp_path / "there" / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()


def test_saving_stays_within_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    checkpoint = Checkpoint(tmp_path, share=0.05, _saved_at=now[0])
    monkeypatch.setattr(
        module,
        "atomic_write",
        lambda path, content, **sync: now.__setitem__(0, now[0] + 1.125) or atomic_write(path, content),
    )
    simulation = tiny.simulation(FedAvg())
    assert checkpoint.due(), "the first is free"
    checkpoint.save(simulation, {})
    assert checkpoint.cost == pytest.approx(2.25)
    now[0] += 44.9
    assert not checkpoint.due()
    now[0] += 0.2
    assert checkpoint.due()


@pytest.mark.parametrize(("cost", "after"), [(1.5, 30.0), (3.0, 60.0), (20.0, 60.0), (90.0, 90.0)])
def test_a_kill_costs_no_more_than_a_minute(cost: float, after: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However dear saving is, beside rounds that are longer; but no more time goes into saving than into rounds."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    checkpoint = Checkpoint(Path(), share=0.05, cost=cost, _saved_at=now[0])
    now[0] += after - 0.1
    assert not checkpoint.due()
    now[0] += 0.2
    assert checkpoint.due()
