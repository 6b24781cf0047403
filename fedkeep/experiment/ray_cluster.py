"""Client steps on the nodes of a Ray cluster.

A trial's server half runs where the run was started, and so do evaluation and records. Its client steps are carried out
by actors: processes that Ray starts on the nodes, each with the CPUs, or the GPU, that the machine says. Results do not
depend on which actor did what, so a lost actor's clients are trained again by another.

A cluster is trusted: Ray's own processes pickle what they tell each other. What FedKeep sends through them is what it
sends to worker processes too: JSON and the memory of tensors, checked against the annotations of the client steps.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedkeep._utils.digests import DamagedFile, Digest, check_file, digest_of
from fedkeep._utils.files import atomic_write
from fedkeep._utils.torch_state import set_plain_torch
from fedkeep.data.cache import cache_folder
from fedkeep.data.catalog import data_folder
from fedkeep.data.dataset import Data, DataSet
from fedkeep.errors import ConfigError, RunError, in_one_line, require_optional
from fedkeep.executors.ipc import pack, unpack
from fedkeep.executors.process_executor import RequestGroup, WorkerExecutor, step_handlers
from fedkeep.executors.workers import DONE, FAILED, Handler, Message, carry_out
from fedkeep.experiment.belonging import code_digests
from fedkeep.experiment.build import build_simulation, clients_and_server_data, split_clients
from fedkeep.experiment.experiment import Trial
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.interface.codec import from_structure, own_storage, to_structure
from fedkeep.models import Weights
from fedkeep.options import as_table, build
from fedkeep.rounds.state import SimulationState
from fedkeep.trials.callbacks import Callback

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds within which a cluster must answer."""
START_SECONDS = 600
"""Seconds for which a trial without any worker waits for the first one."""
MAX_DEATHS = 3
"""How many workers may be lost with the same client steps, or as they start in one place, before the trial ends."""
ANSWER_SECONDS = 10.0
"""Seconds within which idle workers must answer after another one was lost."""
PREPARE: Final = "prepare"
"""The kind of a request that prepares an actor for a trial."""
_ADVICE = "Start one with: ray start --head. Or name the address of one, such as --address 10.0.0.5:6379."


# The cluster


@contextmanager
def connected(machine: Machine) -> Iterator[Any]:
    """Connect to a machine's cluster within the block, unless the program is connected to one already."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; it would warn otherwise
    if machine.address not in (None, "auto"):
        _check_answer(machine.address)
    ray = require_optional("ray", "A run on a Ray cluster (executor ray)", "ray")
    if ray.is_initialized():
        yield ray
        return
    _connect(ray, machine.address or "auto")
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answer(address: str) -> None:
    """Check that somebody answers at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"{address!r} is no address of a Ray cluster. Give HOST:PORT, or auto on one of its nodes.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"no Ray cluster answers at {address}: {in_one_line(error)}. {_ADVICE}") from None


def _connect(ray: Any, address: str) -> None:
    failure: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:
            failure.append(error)

    # In a thread, for the time limit, and since Ray leaves this process's SIGTERM alone there.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if thread.is_alive():
        raise RunError(f"no Ray cluster has answered at {address} within {CONNECT_SECONDS:g} s. {_ADVICE}")
    if failure:
        raise RunError(f"cannot connect to a Ray cluster at {address}: {in_one_line(failure[0], 300)}. {_ADVICE}")


def cluster_workers(machine: Machine) -> int:
    """Return how many workers a run has on the machine's cluster: one for each GPU or CPU, or fewer if it says so."""
    with connected(machine) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_room(resources, machine) for resources in nodes)
    if not room:
        needed = f"CPU: {machine.threads}" + (", GPU: 1" if _uses_gpus(machine) else "")
        offered = {f"CPU: {resources.get('CPU', 0):g}, GPU: {resources.get('GPU', 0):g}" for resources in nodes}
        raise RunError(
            f"no worker fits on a node of the Ray cluster: each takes {needed}, and nodes offer "
            f"{'; '.join(sorted(offered)) or 'nothing'}."
        )
    return min(room, machine.workers or room)


def _room(resources: Mapping[str, float], machine: Machine) -> int:
    """Return how many workers fit on a node."""
    by_cpus = int(resources.get("CPU", 0)) // machine.threads
    return min(by_cpus, int(resources.get("GPU", 0))) if _uses_gpus(machine) else by_cpus


def _uses_gpus(machine: Machine) -> bool:
    return machine.device.partition(":")[0] != "cpu"


# On a node


class RayActor:
    """A process on a node of a cluster, which Ray starts as an actor.

    ``content``: What it has to know of the trial.
    ``get_data``: Returns the clients' data, which are asked for only if the node does not have them yet.
    """

    def __init__(self, content: Mapping[str, Any], get_data: Callable[[], Any]) -> None:
        self.content, self.get_data = content, get_data
        self.handlers: dict[str, Handler] = {PREPARE: self._prepare}

    def carry_out(self, kind: str, *parts: list[Any]) -> list[Any]:
        """Carry out a request.

        ``*parts``: Its content and tensors (see `fedkeep.executors.ipc.pack`); then tensors that Ray copies to a node
            once.
        Returns: The status and the content of the result, and its tensors.
        """
        content, tensors = unpack(parts[0])
        for shared in parts[1:]:
            tensors |= unpack(shared)[1]
        status, content, tensors = carry_out(self.handlers[kind], content, tensors)
        return pack([status, content], tensors)

    def _prepare(self, _: Any, __: dict[str, Tensor]) -> Message:
        content = self.content
        if (found := _versions()) != content["versions"]:
            raise RunError(
                f"node {socket.gethostname()} has {found}, and the run was started with {content['versions']}. Install "
                "the same versions on all nodes."
            )
        machine = build(Machine, content["machine"], "machine")
        torch.set_num_threads(machine.threads)
        set_plain_torch()  # the user's code was imported
        digest = Digest(**content["data"])
        path = cache_folder() / f"ray-{digest.sha256[:16]}.safetensors"
        try:
            check_file(path, digest)
        except DamagedFile:
            atomic_write(path, bytes(self.get_data()))
        import_user_code(machine.use)
        if missing := set(content["code"].values()) - set(code_digests(machine.use, main=True).values()):
            changed = [name for name, digest in content["code"].items() if digest in missing]
            raise RunError(
                f"node {socket.gethostname()} has another {' and '.join(changed)} than the run was begun with. "
                "Copy the same files to all nodes."
            )
        recipe = parse_recipe(content["recipe"], "the recipe", allow_code=machine.allow_code)
        dataset, server, initial = _read_data(path)
        federation = split_clients(recipe, content["seed"], dataset, server)
        method = recipe.method(content["method"])
        simulation = build_simulation(
            recipe, method, content["seed"], federation, machine.device, machine.data_dir, initial or None
        )
        self.handlers |= step_handlers(simulation)
        return None, {}


def _versions() -> str:
    """Return the versions that must be the same on all nodes."""
    return ", ".join(f"{name} {version(name)}" for name in ("fedkeep", "torch"))


def _encode_data(dataset: DataSet, server: Data, initial: Weights) -> bytes:
    """Return the data of a trial as a file, with its initial model if the recipe gives one."""
    structure, found = to_structure((dataset, dict(server), dict(initial)))
    storages: set[int] = set()
    tensors = {name: own_storage(tensor, storages) for name, tensor in found.items()}
    return save(tensors, {"structure": json.dumps(structure)})


def _read_data(path: Path) -> tuple[DataSet, Data, Weights]:
    """Return the data of a file; its memory is shared with the other processes of the node."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 — not a mapping
        data: tuple[DataSet, Data, Weights] = from_structure(
            json.loads(opened.metadata()["structure"]), tensors, tuple[DataSet, Data, Weights]
        )
    return data


# Where the run was started


class WorkerLost(RunError):
    """A worker, its node or what it had computed is gone."""


@dataclass(eq=False)
class RayWorker:
    """An actor as the executor sees it.

    ``ray``: The package `ray`.
    ``stored``: References to tensors in the cluster's object store, from which each node copies them once, by name.
    ``failed_starts``: How many workers before it, in its place, were lost as they started.
    ``answer``: Stands for the answer to the last request.
    """

    ray: Any
    actor: Any
    stored: dict[str, Any]
    failed_starts: int = 0
    answer: Any = None

    def send(self, kind: str, content: Any, tensors: Mapping[str, Tensor] | None = None) -> None:
        tensors, reused = tensors or {}, set(content[1] if content else ())  # what is not reused is one client's alone
        own = {name: tensor for name, tensor in tensors.items() if name not in reused}
        shared = tensors.keys() - own.keys()
        if new := {name: tensors[name] for name in shared if name not in self.stored}:
            self.stored.update(dict.fromkeys(new, self.ray.put(pack(None, new))))
        refs = dict.fromkeys(self.stored[name] for name in tensors if name in shared)
        self.answer = self.actor.carry_out.remote(kind, pack(content, own), *refs)

    def receive(self) -> tuple[str, Any, dict[str, Tensor]]:
        errors = self.ray.exceptions
        try:
            (status, content), tensors = unpack(self.ray.get(self.answer))
        except errors.RayError as error:
            # What the actor itself raised would be raised again by another.
            if isinstance(error, errors.RayTaskError) and not isinstance(error.cause, errors.RayError):
                return FAILED, f"{type(error.cause).__name__}: {in_one_line(error.cause)}", {}
            raise WorkerLost(in_one_line(error, 300)) from None
        return status, content, tensors


class RayExecutor(WorkerExecutor[RayWorker]):
    """Carries out client steps in actors. Those that the cluster has no room for yet join as soon as it has.

    Ray's own restart of an actor waits for room; here a lost worker's clients go to the other workers meanwhile.

    ``trial``: The trial, whose description is written.
    """

    def __init__(self, ray: Any, trial: Trial, count: int, state: SimulationState) -> None:
        super().__init__((), state)
        self.ray = ray
        self.prefetch = 2 * count
        self.starting: set[RayWorker] = set()
        self._machine = trial.experiment.machine
        self._stored: dict[str, Any] = {}
        data = _data(trial)
        # In a function, since Ray itself would copy the data to every node.
        self._arguments = _describe(trial, data), partial(ray.get, ray.put(np.frombuffer(data, np.uint8)))
        self._silence = 0  # how often nobody answered within a second while there was no worker
        for _ in range(count):
            self._start_worker()

    def cancel_all(self) -> None:
        super().cancel_all()
        self._backlog.clear()  # a lost worker's clients are there again

    def _start_worker(self, failed_starts: int = 0) -> None:
        gpus = int(_uses_gpus(self._machine))
        cls = self.ray.remote(RayActor).options(
            num_cpus=self._machine.threads, num_gpus=gpus, scheduling_strategy="SPREAD", max_restarts=0
        )
        worker = RayWorker(self.ray, cls.remote(*self._arguments), self._stored, failed_starts)
        worker.send(PREPARE, None)
        self.starting.add(worker)

    def _dispatch(self) -> None:
        for name in self._stored.keys() - set(self._names.values()):
            del self._stored[name]
        super()._dispatch()

    def _messages(self) -> Iterator[tuple[RequestGroup, str, Any, dict[str, Tensor]]]:
        by_answer = {worker.answer: worker for worker in (*self.under_way, *self.starting)}
        answers = list(by_answer)
        self.ray.wait(answers, timeout=1.0)
        found = self.ray.wait(answers, num_returns=len(answers), timeout=0)[0]
        lost = False
        for worker in map(by_answer.__getitem__, found):
            try:
                kind, content, tensors = worker.receive()
            except WorkerLost as loss:
                self._replace(worker, loss)
                lost = True
                continue
            if worker in self.starting:
                self._use(worker, kind, content)
            else:
                yield self.under_way.pop(worker), kind, content, tensors
        if lost:
            self._replace_silent()
        self._silence = 0 if found or self.workers else self._silence + 1
        if self._silence > START_SECONDS:
            free, name = self.ray.available_resources(), "GPU" if _uses_gpus(self._machine) else "CPU"
            raise RunError(
                f"no worker on the Ray cluster has started within {START_SECONDS} s: {free.get(name, 0):g} {name}s "
                "are free. Wait for others' jobs to end, or add nodes. Finished rounds are saved."
            )

    def _use(self, worker: RayWorker, kind: str, content: Any) -> None:
        """Let a worker that has prepared for the trial have steps."""
        if kind != DONE:
            raise RunError(f"a worker on the Ray cluster could not prepare for the trial: {content}")
        self.starting.remove(worker)
        self.workers.append(worker)
        self.known[worker] = set()

    def _replace(self, worker: RayWorker, loss: WorkerLost) -> None:
        """Start a worker in the place of a lost one, whose clients are trained again."""
        self.ray.kill(worker.actor)  # it may only have been out of reach
        group = self.under_way.pop(worker, None)
        if group is not None:
            group.deaths += 1
            deaths = group.deaths
        else:  # each place counts its own, since a lost node takes many workers with it
            deaths = worker.failed_starts + 1 if worker in self.starting else 0
        self.starting.discard(worker)
        if self.known.pop(worker, None) is not None:
            self.workers.remove(worker)
        if deaths >= MAX_DEATHS:
            where = (
                "as it started" if group is None else f"with the same client steps, perhaps for lack of memory. {group}"
            )
            raise RunError(
                f"a worker on the Ray cluster was lost, and {MAX_DEATHS - 1} before it, {where}. Finished rounds are "
                f"saved. Ray says: {loss}"
            )
        log.warning("A worker on the Ray cluster was lost; others train its clients again. Ray says: %s", loss)
        if group is not None:
            self._backlog.appendleft(group)
        self._start_worker(deaths if group is None else 0)

    def _replace_silent(self) -> None:
        """Replace idle workers that do not answer, as on a lost node: they would lose what they are given."""
        asked = {w.actor.__ray_ready__.remote(): w for w in self.workers if w not in self.under_way}
        if asked:
            self.ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        for answer, worker in asked.items():
            try:
                self.ray.get(answer, timeout=0)
            except self.ray.exceptions.RayError as error:
                self._replace(worker, WorkerLost(in_one_line(error, 300)))

    def _kill_workers(self) -> None:
        for worker in (*self.workers, *self.starting):
            self.ray.kill(worker.actor)
        self.workers.clear()
        self.starting.clear()


def _data(trial: Trial) -> bytes:
    """Return a trial's data as a file."""
    experiment = trial.experiment
    found = clients_and_server_data(experiment.recipe, trial.seed, experiment.machine.data_dir)
    initial = experiment.initial_model(trial.seed)
    return _encode_data(*found, {} if initial is None else initial.weights)


def _describe(trial: Trial, data: bytes) -> dict[str, Any]:
    """Return what an actor has to know to prepare for the trial."""
    machine, local = trial.experiment.machine, data_folder(trial.experiment.machine.data_dir)
    on_node = replace(
        machine,
        executor="processes",
        address=None,
        device="cuda" if _uses_gpus(machine) else "cpu",  # Ray shows an actor its own GPU alone
        data_dir=None if local is None else str(local.resolve()),
        use=tuple(str(Path(name).resolve()) if name.endswith(".py") else name for name in machine.use),
    )
    return {
        "versions": _versions(),
        "machine": as_table(on_node),
        "recipe": trial.experiment.recipe.to_toml(),
        "code": dict(trial.identity.code),
        "method": trial.method.label,
        "seed": trial.seed,
        "data": vars(digest_of(data)),
    }


class RayWorkers(Callback):
    """Lets a Ray cluster carry out a trial's client steps.

    ``count``: The number of workers; 0: none, and all steps are carried out in this process.
    """

    def __init__(self, trial: Trial, count: int) -> None:
        self.trial = trial
        self.count = count
        self._connection = ExitStack()
        self._executor: RayExecutor | None = None

    def on_trial_begin(self, state: SimulationState) -> None:
        if self.count:
            ray = self._connection.enter_context(connected(self.trial.experiment.machine))
            self._executor = state.executor = RayExecutor(ray, self.trial, self.count, state)
        else:
            log.warning("%s runs in this process: a step without type annotations cannot be sent.", self.trial.name)

    def on_trial_end(self, state: SimulationState) -> None:
        if self._executor is not None:
            self._executor.stop()
        self._connection.close()
