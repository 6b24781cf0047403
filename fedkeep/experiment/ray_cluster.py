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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

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
from fedkeep.rounds.executor import Future
from fedkeep.rounds.messages import StepResult
from fedkeep.rounds.state import SimulationState
from fedkeep.trials.callbacks import Callback

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds within which a cluster must answer."""
START_SECONDS = 600.0
"""Seconds for which a trial without any worker waits for the first one."""
MAX_DEATHS = 3
"""How many workers may be lost with the same client steps, or as they start in one place, before the trial ends."""
ANSWER_SECONDS = 10.0
"""Seconds within which idle workers must answer after another one was lost."""
PREPARE: Final = "prepare"
"""The kind of a request that prepares an actor for a trial."""
MISSING: Final = "missing"
"""The answer of an actor on a node that does not have the clients' data yet."""
_DATA = "data"
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
    """A process on a node of a cluster, which Ray starts as an actor."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {PREPARE: self._prepare}

    def carry_out(self, kind: str, own: list[Any], *shared: list[Any]) -> list[Any]:
        """Carry out a request.

        ``own``: Its content and tensors (see `fedkeep.executors.ipc.pack`).
        ``*shared``: Further tensors, which Ray copies to a node once.
        Returns: The status and the content of the result, and its tensors.
        """
        content, tensors = unpack(own)
        for parts in shared:
            tensors |= unpack(parts)[1]
        status, content, tensors = carry_out(self.handlers[kind], content, tensors)
        return pack([status, content], tensors)

    def _prepare(self, content: Any, tensors: dict[str, Tensor]) -> Message:
        _check_versions(content["versions"])
        machine = build(Machine, content["machine"], "machine")
        torch.set_num_threads(machine.threads)
        set_plain_torch()  # the user's code was imported
        digest = Digest(**content[_DATA])
        path = cache_folder() / f"ray-{digest.sha256[:16]}.safetensors"
        if _DATA in tensors:
            atomic_write(path, tensors[_DATA].numpy().tobytes())
        try:
            check_file(path, digest)
        except DamagedFile:
            return MISSING, {}
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


def _versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    return {name: version(name) for name in ("fedkeep", "torch")}


def _check_versions(expected: Mapping[str, str]) -> None:
    if (found := _versions()) != expected:
        raise RunError(
            f"node {socket.gethostname()} has {_listed(found)}, and the run was started with {_listed(expected)}. "
            "Install the same versions on all nodes."
        )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


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


@contextmanager
def _full_store_explained(ray: Any) -> Iterator[None]:
    """Turn Ray's error for objects that have no room into one that says what to do."""
    try:
        yield
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise RunError(
            "models or data have no room in the Ray cluster's object store. Give it more on the machine where the run "
            f"began (ray start --object-store-memory BYTES), or run fewer trials at once. Ray says: "
            f"{in_one_line(error, 300)}"
        ) from None


class SharedTensors:
    """Tensors in the cluster's object store, from which each node copies them once."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._refs: dict[str, Any] = {}

    def refs(self, tensors: Mapping[str, Tensor]) -> list[Any]:
        """Return references to objects that contain tensors; those that are new are put into the store.

        ``tensors``: Tensors by name. A name stands for the same tensor as long as it is kept.
        """
        new = {name: tensor for name, tensor in tensors.items() if name not in self._refs}
        if new:
            with _full_store_explained(self._ray):
                self._refs |= dict.fromkeys(new, self._ray.put(pack(None, new)))
        return list(dict.fromkeys(self._refs[name] for name in tensors))

    def keep(self, names: set[str]) -> None:
        """Forget all tensors but these."""
        self._refs = {name: ref for name, ref in self._refs.items() if name in names}


@dataclass(eq=False)
class RayWorker:
    """An actor as the executor sees it.

    ``ray``: The package `ray`.
    ``shared``: Tensors that several actors receive.
    ``failed_starts``: How many workers before it, in its place, were lost as they started.
    ``answer``: Stands for the answer to the last request.
    """

    ray: Any
    actor: Any
    shared: SharedTensors
    failed_starts: int = 0
    answer: Any = None

    def prepare(self, content: Any, *data: Any) -> None:
        """Let the actor prepare for a trial.

        ``content``: What it has to know.
        ``*data``: The clients' data, if its node lacks them.
        """
        self._ask(PREPARE, pack(content, {}), *data)

    def send(self, kind: str, content: Any, tensors: Mapping[str, Tensor] | None = None) -> None:
        tensors, reused = tensors or {}, set(content[1])  # what is not reused is one client's alone
        own = {name: tensor for name, tensor in tensors.items() if name not in reused}
        rest = {name: tensor for name, tensor in tensors.items() if name in reused}
        self._ask(kind, pack(content, own), *self.shared.refs(rest))

    def _ask(self, *request: Any) -> None:
        with _full_store_explained(self.ray):
            self.answer = self.actor.carry_out.remote(*request)

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

    def kill(self) -> None:
        """End the actor, also in the middle of a step."""
        self.ray.kill(self.actor)


class RayExecutor(WorkerExecutor[RayWorker]):
    """Carries out client steps in actors. Those that the cluster has no room for yet join as soon as it has.

    ``trial``: The trial, whose description is written.
    """

    def __init__(self, ray: Any, trial: Trial, count: int, state: SimulationState) -> None:
        super().__init__((), state)
        self.ray = ray
        self.prefetch = 2 * count
        self.starting: set[RayWorker] = set()
        self._trial = trial
        self._shared = SharedTensors(ray)
        self._preparation = self._describe()
        self._deaths: Counter[RequestGroup] = Counter()
        self._alone_since = time.monotonic()
        for _ in range(count):
            self._start_worker()

    def as_completed(self, futures: Sequence[Future]) -> Iterator[int]:
        self._alone_since = time.monotonic()
        return super().as_completed(futures)

    def wait(self, future: Future) -> StepResult:
        self._alone_since = time.monotonic()  # answers are read only while somebody waits
        return super().wait(future)

    def cancel_all(self) -> None:
        super().cancel_all()
        self._backlog.clear()  # a lost worker's clients are there again

    @cached_property
    def _shared_data(self) -> Any:
        """The clients' data in the cluster's object store."""
        data = torch.frombuffer(bytearray(self._data()), dtype=torch.uint8)
        with _full_store_explained(self.ray):
            return self.ray.put(pack(None, {_DATA: data}))

    def _data(self) -> bytes:
        experiment = self._trial.experiment
        found = clients_and_server_data(experiment.recipe, self._trial.seed, experiment.machine.data_dir)
        initial = experiment.initial_model(self._trial.seed)
        return _encode_data(*found, {} if initial is None else initial.weights)

    def _describe(self) -> dict[str, Any]:
        """Return what an actor has to know to prepare for the trial."""
        machine = self._trial.experiment.machine
        digest = digest_of(self._data())
        local = data_folder(machine.data_dir)
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
            "recipe": self._trial.experiment.recipe.to_toml(),
            "code": dict(self._trial.identity.code),
            "method": self._trial.method.label,
            "seed": self._trial.seed,
            _DATA: {"bytes": digest.bytes, "sha256": digest.sha256},
        }

    def _start_worker(self, failed_starts: int = 0) -> None:
        machine = self._trial.experiment.machine
        options = {"num_cpus": machine.threads, "num_gpus": int(_uses_gpus(machine)), "scheduling_strategy": "SPREAD"}
        actor = self.ray.remote(RayActor).options(**options, max_restarts=0).remote()
        worker = RayWorker(self.ray, actor, self._shared, failed_starts)
        worker.prepare(self._preparation)
        self.starting.add(worker)

    def _dispatch(self) -> None:
        self._shared.keep(set(self._names.values()))
        super()._dispatch()

    def _messages(self) -> Iterator[tuple[RequestGroup, str, Any, dict[str, Tensor]]]:
        by_answer = {worker.answer: worker for worker in (*self.under_way, *self.starting)}
        answers = list(by_answer)
        self.ray.wait(answers, timeout=1.0)
        lost = False
        for answer in self.ray.wait(answers, num_returns=len(answers), timeout=0)[0]:
            worker = by_answer[answer]
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
        self._check_not_alone()

    def _use(self, worker: RayWorker, kind: str, content: Any) -> None:
        """Give steps to a worker that has prepared for the trial, or send it the data that it lacks."""
        if kind != DONE:
            raise RunError(f"a worker on the Ray cluster could not prepare for the trial: {content}")
        if content == MISSING:
            worker.prepare(self._preparation, self._shared_data)
            self._alone_since = time.monotonic()
            return
        self.starting.remove(worker)
        self.workers.append(worker)
        self.known[worker] = set()

    def _replace(self, worker: RayWorker, loss: WorkerLost) -> None:
        """Start a worker in the place of a lost one, whose clients are trained again."""
        worker.kill()  # it may only have been out of reach
        group = self.under_way.pop(worker, None)
        if group is not None:
            self._deaths[group] += 1
            deaths = self._deaths[group]
        else:  # each place counts its own, since a lost node takes many workers with it
            deaths = worker.failed_starts + 1 if worker in self.starting else 0
        self.starting.discard(worker)
        if self.known.pop(worker, None) is not None:
            self.workers.remove(worker)
            self._alone_since = time.monotonic()
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

    def _check_not_alone(self) -> None:
        if not self.workers and time.monotonic() - self._alone_since > START_SECONDS:
            machine = self._trial.experiment.machine
            free, name = self.ray.available_resources(), "GPU" if _uses_gpus(machine) else "CPU"
            raise RunError(
                f"no worker on the Ray cluster has started within {START_SECONDS:g} s: {free.get(name, 0):g} {name}s "
                "are free. Wait for others' jobs to end, or add nodes. Finished rounds are saved."
            )

    def _kill_workers(self) -> None:
        for worker in (*self.workers, *self.starting):
            worker.kill()
        self.workers.clear()
        self.starting.clear()


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
