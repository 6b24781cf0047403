"""Worker processes: how they start, how they are asked, and how they end.

The same kind of worker runs whole trials and single client steps. Its parent sends requests of named kinds, and
receives messages until one says that the request is done or has failed. A worker ends when its parent closes the
connection or dies. If that happens during a request, a `KeyboardInterrupt` is raised in the worker, so that a trial can
save its last round. Ctrl-C is sent to all processes of a terminal, and SIGTERM to all of a job or service; workers
ignore them, and their parent decides what to do.

A message is a structure as JSON, then each tensor as its bytes. The codec for sites and disks
(`fedkeep.interface.codec`) makes one blob in a known format, which would only cost time here.
"""

import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.process import MemoryTrimmer, keep_freed_memory, signals_blocked_in_children
from fedkeep.errors import FedKeepError, RunError


def send_message(connection: Connection, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Send a structure and its tensors.

    ``structure``: A structure as from `fedkeep.interface.codec.to_structure`.
    ``tensors``: Its tensors by name.
    """
    # Everything is prepared before anything is sent: an error in between would leave half a message on the connection.
    head, *parts = pack(structure, tensors)
    connection.send_bytes(head)
    for part in parts:
        _write(connection, part.data)


def receive_message(connection: Connection) -> tuple[Any, dict[str, Tensor]]:
    """Receive what `send_message` has sent.

    Returns: Its tensors by name, on the CPU.
    """
    structure, tensors = _empty(connection.recv_bytes())
    for tensor in tensors.values():
        _read_into(connection, _bytes_of(tensor).data)
    return structure, tensors


def _write(connection: Connection, content: memoryview) -> None:
    """Write a tensor's bytes as they are, as `_read_into` reads them.

    `multiprocessing` would copy them three more times where they arrive: 45 MB take 75 ms there, and 10 ms in this way.
    """
    while content:
        content = content[os.write(connection.fileno(), content) :]


def _read_into(connection: Connection, content: memoryview) -> None:
    """Read a tensor's bytes to where they belong."""
    while content:
        if not (count := os.readv(connection.fileno(), [content])):
            raise EOFError
        content = content[count:]


def pack(structure: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
    """Return a structure and its tensors as bytes.

    ``structure``: A structure as from `fedkeep.interface.codec.to_structure`.
    ``tensors``: Its tensors by name.
    Returns: The structure and the tensors' forms as JSON, then the memory of each tensor that is not empty, uint8
        [bytes].
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in plain.items()]
    head = json.dumps([structure, described], separators=(",", ":")).encode()
    return [head, *(_bytes_of(tensor) for tensor in plain.values() if tensor.numel())]


def unpack(parts: Sequence[Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return what `pack` has packed.

    ``parts``: What it returned; the arrays may be read-only.
    Returns: Its tensors by name, on the CPU, in memory of their own.
    """
    structure, tensors = _empty(parts[0])
    for tensor, content in zip((t for t in tensors.values() if t.numel()), parts[1:], strict=True):
        _bytes_of(tensor)[:] = content
    return structure, tensors


def _empty(head: bytes) -> tuple[Any, dict[str, Tensor]]:
    structure, described = json.loads(head)
    return structure, {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy()


DONE, REFUSED, FAILED, PROGRESS = "done", "refused", "failed", "progress"
"""The status of a worker's message: a result, an error that FedKeep raised on purpose, another error, or progress."""

Message: TypeAlias = tuple[Any, dict[str, Tensor]]
Handler: TypeAlias = Callable[[Any, dict[str, Tensor]], Message]
"""Carries out one kind of request: maps content and tensors of the request to those of the result."""

Main: TypeAlias = Callable[..., None]


class WorkerDied(RunError):
    """A worker process has ended, or could not be started."""


@dataclass(eq=False)
class Worker:
    """A worker process as its parent sees it.

    ``process``: The process; None in tests in which the worker is a thread.
    ``heard``: Whether it has sent a message.
    """

    connection: Connection
    process: BaseProcess | None = None
    heard: bool = False

    def send(self, kind: str, content: Any, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a request.

        ``content``: The content, as JSON can represent it.
        ``tensors``: Tensors by name.
        """
        try:
            send_message(self.connection, [kind, content], tensors or {})
        except OSError:
            raise self.death() from None

    def receive(self) -> tuple[str, Any, dict[str, Tensor]]:
        """Wait for a message of the worker.

        Returns: One of `DONE`, `REFUSED`, `FAILED` and `PROGRESS`.
        Returns: Tensors by name.
        """
        try:
            self.heard |= self.connection.poll()  # before it is read: a signal may come in between
            (kind, content), tensors = receive_message(self.connection)
        except (EOFError, OSError):
            raise self.death() from None
        self.heard = True
        return kind, content, tensors

    def death(self) -> "WorkerDied":
        """Return the error for a worker that has died."""
        code = None
        if self.process is not None:
            self.process.join(timeout=5)
            code = self.process.exitcode
        why = {None: ", perhaps for lack of memory", -9: ", perhaps for lack of memory", 1: "; its error stands above"}
        return WorkerDied(f"a worker process died with code {code}{why.get(code, '')}.")


@contextmanager
def _paths_for_workers() -> Iterator[None]:
    """Show multiprocessing where imports look now, too, not only where Python began, and no main without a file."""
    main, path = sys.modules["__main__"], sys.path[:]
    file = getattr(main, "__file__", None)
    is_hidden = file is not None and not os.path.isfile(file)  # of a program that came by a pipe: <stdin>
    try:
        sys.path[:] = [entry or os.getcwd() for entry in path]
        if "" in path and (began := process.ORIGINAL_DIR):  # type: ignore[attr-defined]
            sys.path.append(began)
        if is_hidden:
            del main.__file__
        yield
    finally:
        sys.path[:] = path
        if is_hidden:
            main.__file__ = file


def start_workers(count: int, main: Main, *args: Any) -> list[Worker]:
    """Start worker processes.

    ``main``: What each process calls, as ``main(connection, *args)``.
    ``*args``: Further arguments, which must be picklable.
    """
    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    workers: list[Worker] = []
    try:
        # Python would start its resource tracker with the first process, and unblock SIGTERM as it does.
        resource_tracker.ensure_running()
        for _ in range(count):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=main, args=(worker_end, *args))
            with worker_end, _ignoring_interrupts(), signals_blocked_in_children(), _paths_for_workers():
                process.start()
                workers.append(Worker(parent_end, process))  # before a signal that has come meanwhile
            # Its end is closed here, so that the worker's death closes the connection.
    except BaseException as error:
        kill_workers(workers)  # else this process would wait for them when it ends
        if not isinstance(error, OSError | AssertionError):
            raise
        raise WorkerDied(
            f"worker process {len(workers) + 1} of {count} could not be started: {error}. Run with fewer, or in this "
            "process alone (workers=1); open files and processes have limits (ulimit -n, ulimit -u)."
        ) from error
    return workers


def stop_workers(workers: Sequence[Worker]) -> None:
    """Let workers end, also in the middle of a request, and wait for them: a trial saves its last round first.

    Workers that have not sent a message are killed: they are starting, or have finished no round.
    """
    # What was sent and not yet received counts: it shows a finished round.
    kill_workers([worker for worker in workers if not worker.heard and not worker.connection.poll()])
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        if worker.process is not None:
            worker.process.join()


def kill_workers(workers: Sequence[Worker]) -> None:
    """End workers that have nothing to save, at once."""
    for worker in workers:
        worker.connection.close()
        if worker.process is not None:
            worker.process.kill()
    for worker in workers:
        if worker.process is not None:
            worker.process.join()


def wait_for_any(workers: Collection[Worker]) -> list[Worker]:
    """Wait until at least one worker has sent a message.

    Returns: Those with a message; may be empty after a timeout.
    """
    by_connection = {worker.connection: worker for worker in workers}
    processes = {worker.process.sentinel: worker for worker in workers if worker.process is not None}
    ready = wait([*by_connection, *processes], timeout=1.0)  # without a timeout, it has missed the death of a worker
    with_message = [worker for connection, worker in by_connection.items() if connection in ready]
    for worker in workers:
        if worker.process is not None and not worker.process.is_alive() and not worker.connection.poll():
            raise worker.death()
    return with_message


def serve(
    connection: Connection,
    handlers: Mapping[str, Handler],
    receive: Callable[[], Message | None] | None = None,
    at_work: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Carry out requests, one after another, until the connection is closed: the main loop of a worker.

    ``receive``: Returns the next request, or None after the last; by default requests are read from the connection.
    ``at_work``: Returns a context in which a request is carried out.
    """
    keep_freed_memory()
    trimmer = MemoryTrimmer()
    while True:
        try:
            message = receive_message(connection) if receive is None else receive()
        except (EOFError, OSError):
            return
        if message is None:
            return
        (kind, content), tensors = message
        with at_work():
            status, content, result = carry_out(handlers[kind], content, tensors)
        try:
            try:
                send_message(connection, [status, content], result)
            except (RuntimeError, TypeError, ValueError):  # a tensor that cannot be sent
                send_message(connection, [FAILED, traceback.format_exc()], {})
        except OSError:  # the parent is gone
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in result.values())
        del message, content, tensors, result  # models, which need not stay in memory until the next request
        trimmer.dropped(size)


def carry_out(handler: Handler, content: Any, tensors: dict[str, Tensor]) -> tuple[str, Any, dict[str, Tensor]]:
    """Carry out a request.

    ``tensors``: Its tensors by name.
    Returns: `DONE`, or `REFUSED` or `FAILED` after an exception.
    Returns: The content of the result, or the text of the exception.
    Returns: The tensors of the result, by name.
    """
    try:
        return DONE, *handler(content, tensors)
    except FedKeepError as error:
        return REFUSED, "\n".join([str(error), *getattr(error, "__notes__", ())]), {}
    except Exception:
        return FAILED, traceback.format_exc(), {}


def run_worker(connection: Connection, handlers: Mapping[str, Handler]) -> None:
    """Serve a parent from this process until it closes the connection or dies; called by a worker's ``main``.

    ``handlers``: Carry out requests, by kind.
    """
    inbox = _Inbox(connection)
    with suppress(KeyboardInterrupt):  # the request was abandoned; its finished rounds are saved
        serve(connection, handlers, inbox.receive, inbox.at_work)


class _Inbox:
    """Reads the parent's messages in a thread, which notices at once when the parent is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_over = self._is_at_work = False
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> Message | None:
        return self._messages.get()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._is_at_work = True
        try:
            if self._is_over:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_at_work = False

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(receive_message(self._connection))
        except (EOFError, OSError):
            self._is_over = True
            self._messages.put(None)
            if self._is_at_work:
                # The signal of Ctrl-C interrupts sleep too.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        except BaseException:  # no memory for a message: the parent, which still sends it, would wait for ever
            try:
                traceback.print_exc()
            finally:
                os._exit(1)

    def _on_interrupt(self, *_: object) -> None:
        if self._is_over and self._is_at_work:
            self._is_at_work = False  # only once, so that saving is not interrupted
            raise KeyboardInterrupt


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Let processes that are started in the block ignore Ctrl-C until they have their own handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
