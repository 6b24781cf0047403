"""Client steps on the nodes of a Ray cluster.

A trial's server half runs where the run was started, and so do evaluation and records. Its client steps are tasks that
Ray gives to processes on the nodes, each with the CPUs, or the GPU, that the machine says. Ray repeats a task whose
node or process is lost: results do not depend on who did what. A process prepares for a trial with its first task, and
is then used again.

A cluster is trusted: Ray's own processes pickle what they tell each other. What FedKeep sends through them is what it
sends to worker processes too: JSON and the memory of tensors, checked against the annotations of the client steps.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from fedkeep._utils.digests import DamagedFile, Digest, check_file, digest_of
from fedkeep._utils.files import atomic_write
from fedkeep._utils.torch_state import set_plain_torch
from fedkeep.data.cache import cache_folder
from fedkeep.data.catalog import data_folder
from fedkeep.data.dataset import Data, DataSet
from fedkeep.errors import ConfigError, RunError, in_one_line, require_optional
from fedkeep.executors.process_executor import STEPS, RequestGroup, WorkerExecutor, step_handlers
from fedkeep.executors.workers import DONE, FAILED, Handler, Message, carry_out, pack, unpack
from fedkeep.experiment.build import build_simulation, clients_and_server_data, split_clients
from fedkeep.experiment.experiment import Trial
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.provenance import code_digests
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.interface.codec import encode, from_structure
from fedkeep.models import Weights
from fedkeep.options import as_table, build
from fedkeep.rounds.state import SimulationState
from fedkeep.trials.callbacks import Callback

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds within which a cluster must answer."""
START_SECONDS = 600
"""Seconds for which a trial waits for the first process that is ready for it."""
LOOK_SECONDS = 60
"""Seconds without any answer after which it is seen whether there is a node left."""
MAX_LOSSES = 3
"""How often the same client steps may be lost with their process before the trial ends."""
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
        room = _room(ray, machine)
    if not room:
        needed = f"CPU: {machine.threads}" + (", GPU: 1" if _uses_gpus(machine) else "")
        raise RunError(f"no worker fits on a node of the Ray cluster: each takes {needed}.")
    return min(room, machine.workers or room)


def _room(ray: Any, machine: Machine) -> int:
    """Return how many workers fit on the nodes, each of them on one."""
    room = 0
    for resources in (node["Resources"] for node in ray.nodes() if node["Alive"]):
        by_cpus = int(resources.get("CPU", 0)) // machine.threads
        room += min(by_cpus, int(resources.get("GPU", 0))) if _uses_gpus(machine) else by_cpus
    return room


def _uses_gpus(machine: Machine) -> bool:
    return machine.device.partition(":")[0] != "cpu"


# On a node


_PREPARED: dict[str, dict[str, Handler]] = {}
"""What this process is ready for: the handlers of the last trial, by its description."""


def carry_out_on_node(description: str, data: Sequence[Any], *parts: list[Any]) -> list[Any]:
    """Carry out client steps, as a task of Ray; without any, only prepare for the trial.

    ``description``: Of the trial (see `_describe`), as JSON.
    ``data``: A reference to the clients' data, which are read only if the node does not have them yet.
    ``*parts``: The request's content and tensors (see `fedkeep.executors.workers.pack`); then tensors that Ray copies
        to a node once.
    Returns: The status and the content of the result, and its tensors.
    """

    def handle(content: Any, tensors: dict[str, Tensor]) -> Message:
        if description not in _PREPARED:
            _PREPARED.clear()
            _PREPARED[description] = _prepare(json.loads(description), data)
        return _PREPARED[description][STEPS](content, tensors) if parts else (None, {})

    content, tensors = unpack(parts[0]) if parts else (None, {})
    for shared in parts[1:]:
        tensors |= unpack(shared)[1]
    status, content, tensors = carry_out(handle, content, tensors)
    return pack([status, content], tensors)


def _prepare(content: Mapping[str, Any], data: Sequence[Any]) -> dict[str, Handler]:
    """Return what carries out the client steps of a trial in this process."""
    if (found := _versions()) != content["versions"]:
        raise RunError(
            f"node {socket.gethostname()} has {found}, and the run was started with {content['versions']}. Install the "
            "same versions on all nodes."
        )
    machine = build(Machine, content["machine"], "machine")
    torch.set_num_threads(machine.threads)
    set_plain_torch()  # the user's code was imported
    digest = Digest(**content["data"])
    path = cache_folder() / f"ray-{digest.sha256[:16]}.safetensors"
    try:
        check_file(path, digest)
    except DamagedFile:
        atomic_write(path, bytes(require_optional("ray", "A node of a Ray cluster", "ray").get(data[0])))
    import_user_code(machine.use)
    if missing := set(content["code"].values()) - set(code_digests(machine.use, main=True).values()):
        changed = [name for name, digest in content["code"].items() if digest in missing]
        raise RunError(
            f"node {socket.gethostname()} has another {' and '.join(changed)} than the run was begun with. Copy the "
            "same files to all nodes."
        )
    recipe = parse_recipe(content["recipe"], "the recipe", allow_code=machine.allow_code)
    dataset, server, initial = _read_data(path)
    federation = split_clients(recipe, content["seed"], dataset, server)
    method, device, data_dir = recipe.method(content["method"]), machine.device, machine.data_dir
    simulation = build_simulation(recipe, method, content["seed"], federation, device, data_dir, initial or None)
    return step_handlers(simulation)


def _versions() -> str:
    """Return the versions that must be the same on all nodes."""
    return ", ".join(f"{name} {version(name)}" for name in ("fedkeep", "torch"))


def _read_data(path: Path) -> tuple[DataSet, Data, Weights]:
    """Return the data of a file; its memory is shared with the other processes of the node."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 — not a mapping
    structure = json.loads(tensors.pop("structure").numpy().tobytes())
    data: tuple[DataSet, Data, Weights] = from_structure(structure, tensors, tuple[DataSet, Data, Weights])
    return data


# Where the run was started


@dataclass(eq=False)
class RayWorker:
    """Room for one task at a time, as the executor sees it; Ray chooses the process.

    ``task``: Gives Ray a task of the trial.
    ``stored``: References to tensors in the cluster's object store, from which each node copies them once, by name.
    ``answer``: Stands for the answer to the last request.
    """

    ray: Any
    task: Callable[..., Any]
    stored: dict[str, Any]
    answer: Any = None

    def send(self, kind: str, content: Any, tensors: Mapping[str, Tensor] | None = None) -> None:
        encoded, reused, summed = content
        tensors = tensors or {}
        own = {name: tensor for name, tensor in tensors.items() if name not in reused}  # one client's alone
        if new := {name: tensors[name] for name in reused if name not in self.stored}:
            self.stored.update(dict.fromkeys(new, self.ray.put(pack(None, new))))
        shared = dict.fromkeys(self.stored[name] for name in reused)
        self.answer = self.task(pack([encoded, [], summed], own), *shared)

    def receive(self) -> tuple[str, Any, dict[str, Tensor]]:
        return _answer(self.ray, self.answer)


def _answer(ray: Any, answer: Any) -> tuple[str, Any, dict[str, Tensor]]:
    """Return status, content and tensors of a result."""
    try:
        (status, content), tensors = unpack(ray.get(answer))
    except ray.exceptions.RayTaskError as error:  # what it raised would be raised again
        return FAILED, f"{type(error.cause).__name__}: {in_one_line(error.cause)}", {}
    except ray.exceptions.RayError as error:
        raise RunError(
            f"a worker on the Ray cluster was lost, and {MAX_LOSSES - 1} before it, with the same client steps, "
            f"perhaps for lack of memory. Finished rounds are saved. Ray says: {in_one_line(error, 300)}"
        ) from None
    return status, content, tensors


class RayExecutor(WorkerExecutor[RayWorker]):
    """Carries out client steps in tasks of Ray, so many at a time."""

    def __init__(self, ray: Any, trial: Trial, count: int, state: SimulationState) -> None:
        self.ray, self._machine, self._stored = ray, trial.experiment.machine, dict[str, Any]()
        data, gpus = _data(trial), int(_uses_gpus(self._machine))
        remote = ray.remote(max_calls=0)(carry_out_on_node).options(
            num_cpus=self._machine.threads, num_gpus=gpus, scheduling_strategy="SPREAD", max_retries=MAX_LOSSES - 1
        )
        # A reference in a list, since Ray itself would copy the data to every node.
        task = partial(remote.remote, json.dumps(_describe(trial, data)), [ray.put(np.frombuffer(data, np.uint8))])
        super().__init__([RayWorker(ray, task, self._stored) for _ in range(count)], state)
        self._first = task()
        self._silence = 0  # how often nobody answered within a second

    def _dispatch(self) -> None:
        for name in self._stored.keys() - set(self._names.values()):
            del self._stored[name]
        super()._dispatch()

    def _messages(self) -> Iterator[tuple[RequestGroup, str, Any, dict[str, Tensor]]]:
        by_answer = {worker.answer: worker for worker in self.under_way}
        answers = [*by_answer, *([] if self._first is None else [self._first])]
        self.ray.wait(answers, timeout=1.0)
        found = self.ray.wait(answers, num_returns=len(answers), timeout=0)[0]
        self._silence = 0 if found else self._silence + 1
        if self._first in found:
            status, content, _ = _answer(self.ray, self._first)
            if status != DONE:
                raise RunError(f"a worker on the Ray cluster could not prepare for the trial: {content}")
            self._first = None
        if self._first is not None and self._silence > START_SECONDS:
            free, name = self.ray.available_resources(), "GPU" if _uses_gpus(self._machine) else "CPU"
            raise RunError(
                f"no worker on the Ray cluster has started within {START_SECONDS} s: {free.get(name, 0):g} {name}s "
                "are free. Wait for others' jobs to end, or add nodes. Finished rounds are saved."
            )
        if self._silence and self._silence % LOOK_SECONDS == 0 and not _room(self.ray, self._machine):
            raise RunError("no node is left on the Ray cluster on which a worker fits. Finished rounds are saved.")
        for worker in [by_answer[answer] for answer in found if answer in by_answer]:
            yield self.under_way.pop(worker), *worker.receive()

    def _kill_workers(self) -> None:
        for worker in self.workers:
            if worker.answer is not None:
                self.ray.cancel(worker.answer, force=True)
        self.workers.clear()


def _data(trial: Trial) -> bytes:
    """Return a trial's data as a file."""
    experiment = trial.experiment
    dataset, server = clients_and_server_data(experiment.recipe, trial.seed, experiment.machine.data_dir)
    initial = experiment.initial_model(trial.seed)
    return encode((dataset, dict(server), {} if initial is None else dict(initial.weights)))


def _describe(trial: Trial, data: bytes) -> dict[str, Any]:
    """Return what a process on a node has to know to prepare for the trial."""
    machine, local = trial.experiment.machine, data_folder(trial.experiment.machine.data_dir)
    on_node = replace(
        machine,
        executor="processes",
        address=None,
        device="cuda" if _uses_gpus(machine) else "cpu",  # Ray shows a task its own GPU alone
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
