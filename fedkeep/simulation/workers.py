"""Worker processes: how they start, the messages to and from them, and how they end.

One kind of worker serves whole trials and single client steps. Its parent sends requests, each with the name of what
is asked, and gets messages until one says that the request is done or failed. A worker ends when its parent closes the
connection or dies, in the middle of a request too: a `KeyboardInterrupt` is then raised in it, so that a trial saves
its last round. Ctrl-C reaches all processes of a terminal; workers ignore it, and their parent decides.
"""

from __future__ import annotations

import _thread
import multiprocessing
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from torch import Tensor

from fedkeep.errors import FedKeepError, RunError
from fedkeep.simulation import ipc

DONE, REFUSED, FAILED, PROGRESS = "done", "refused", "failed", "progress"
"""What a message of a worker is: a result, an error that a user understands, another error, or how far it is."""

Message: TypeAlias = tuple[Any, dict[str, Tensor]]
Handler: TypeAlias = Callable[[Any, dict[str, Tensor]], Message]
"""Carries out one kind of request: maps its content and tensors to those of the result."""

Main: TypeAlias = Callable[..., None]


@dataclass(eq=False)
class Worker:
    """A worker as its parent sees it.

    Attributes
    ----------
    connection : Connection
        Leads to it.
    process : BaseProcess, optional
        None in tests where it is a thread.
    """

    connection: Connection
    process: BaseProcess | None = None

    def send(self, kind: str, content: Any, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a request; raise `RunError` if the worker is dead."""
        try:
            ipc.send(self.connection, [kind, content], tensors or {})
        except OSError:
            raise self.death() from None

    def receive(self) -> tuple[str, Any, dict[str, Tensor]]:
        """Return a message: what it is, its content and tensors; raise `RunError` if the worker is dead."""
        try:
            (kind, content), tensors = ipc.receive(self.connection)
        except (EOFError, OSError):
            raise self.death() from None
        return kind, content, tensors

    def death(self) -> RunError:
        """Return the error that says how the worker died."""
        code = None
        if self.process is not None:
            self.process.join(timeout=5)
            code = self.process.exitcode
        why = {None: ", perhaps for lack of memory", -9: ", perhaps for lack of memory", 1: "; its error stands above"}
        return RunError(f"a worker process died with code {code}{why.get(code, '')}.")


def start_workers(count: int, main: Main, *args: Any) -> list[Worker]:
    """Start processes that each call ``main(connection, *args)``."""
    context = multiprocessing.get_context("spawn")  # a forked PyTorch may hang
    workers = []
    for _ in range(count):
        near, far = context.Pipe()
        process = context.Process(target=main, args=(far, *args))
        with _ignoring_interrupts():
            process.start()
        far.close()  # so that the worker's death closes the connection
        workers.append(Worker(near, process))
    return workers


def stop_workers(workers: Sequence[Worker], patience: float | None = None) -> None:
    """Let workers end, in the middle of a request if need be, and wait for them.

    Parameters
    ----------
    workers : Sequence[Worker]
        Those to end.
    patience : float, optional
        Seconds after which they are killed; None: never, since a trial saves its last round first.
    """
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        if worker.process is not None:
            worker.process.join(patience)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def wait_for_any(workers: Collection[Worker]) -> list[Worker]:
    """Wait until workers have something to say, and return them; raise `RunError` if one has died."""
    by_connection = {worker.connection: worker for worker in workers}
    processes = {worker.process.sentinel: worker for worker in workers if worker.process is not None}
    ready = wait([*by_connection, *processes], timeout=1.0)  # a wait without end was seen to miss a death
    speaking = [worker for connection, worker in by_connection.items() if connection in ready]
    for worker in workers:
        if worker.process is not None and not worker.process.is_alive() and not worker.connection.poll():
            raise worker.death()
    return speaking


def serve(
    connection: Connection,
    handlers: Mapping[str, Handler],
    receive: Callable[[], Message | None] | None = None,
    at_work: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Carry out requests, one after another, until the connection is closed: the loop of a worker.

    Parameters
    ----------
    connection : Connection
        Leads to the parent.
    handlers : Mapping[str, Handler]
        What carries out requests, by their kind.
    receive : Callable, optional
        Returns the next request, or None after the last; by default it is read from the connection.
    at_work : Callable
        Returns a context for carrying one out.
    """
    while True:
        try:
            message = ipc.receive(connection) if receive is None else receive()
        except (EOFError, OSError):
            return
        if message is None:
            return
        (kind, content), tensors = message
        result: dict[str, Tensor] = {}
        try:
            with at_work():
                said, result = handlers[kind](content, tensors)
            status = DONE
        except FedKeepError as error:
            status, said = REFUSED, "\n".join([str(error), *getattr(error, "__notes__", ())])
        except Exception:
            status, said = FAILED, traceback.format_exc()
        try:
            try:
                ipc.send(connection, [status, said], result)
            except (RuntimeError, TypeError, ValueError):  # of a tensor that cannot travel
                ipc.send(connection, [FAILED, traceback.format_exc()], {})
        except OSError:  # nobody is there to hear it
            return


def run_worker(connection: Connection, handlers: Mapping[str, Handler]) -> None:
    """Serve a parent from this process until it closes the connection or dies; what a worker's ``main`` calls."""
    inbox = _Inbox(connection)
    with suppress(KeyboardInterrupt):  # the request was given up; what it had finished is saved
        serve(connection, handlers, inbox.receive, inbox.at_work)


class _Inbox:
    """Reads the parent's messages in a thread, which therefore notices at once when there is no parent any more."""

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
                self._messages.put(ipc.receive(self._connection))
        except (EOFError, OSError):
            self._is_over = True
            self._messages.put(None)
            if self._is_at_work:
                _interrupt_main_thread()

    def _on_interrupt(self, *_: object) -> None:
        if self._is_over and self._is_at_work:
            self._is_at_work = False  # once: what is then saved is not disturbed
            raise KeyboardInterrupt


def _interrupt_main_thread() -> None:
    """Send the main thread what Ctrl-C sends; it wakes from sleep too, where the system can do that."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Let processes that start in the block ignore Ctrl-C until they can tell who interrupts them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
