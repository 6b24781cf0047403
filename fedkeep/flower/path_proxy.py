"""A reverse proxy before the SuperLink: it forwards requests for Flower's Fleet API and refuses all others.

Flower 1.41 serves its Fleet API and its Control API on one port, and the Control API has no authentication: whoever
reaches it can register nodes and start runs, and so run code at every site. The SuperLink therefore listens on its
own machine only, and this proxy forwards, unread, what nodes may send. It is for trials; `fedkeep.flower.nginx` writes
the configuration of a web server that does the same.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.errors import ConfigError, MissingExtra
from fedkeep.flower.keys import warn_before_expiry

try:
    import httpx
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as error:
    raise MissingExtra("The proxy", "flower") from error

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FLEET_PATH = re.compile(r"/v1/fleet/[a-z-]+")
HOP_HEADERS = {b"connection", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}
"""Headers that concern one connection only, and are not forwarded."""
WARNING_SECONDS = 60.0  # seconds between two warnings about one address: nobody shall fill the disk with them
DAY = 24 * 3600.0


@dataclass(frozen=True)
class Limits:
    """What one sender may take from the proxy.

    ``connections``: Connections that one address may have open, those in the TLS handshake included.
    ``header_bytes``: The largest size of a request's header.
    ``body_bytes``: The largest size of a request's body. Flower sends arrays in pieces of 5 MB.
    ``header_seconds``: Seconds for the TLS handshake, and then for a whole header.
    ``body_seconds``: Seconds between two parts of a body.
    """

    connections: int = 64
    header_bytes: int = 16_384
    body_bytes: int = 32_000_000
    header_seconds: float = 10.0
    body_seconds: float = 30.0


USUAL_LIMITS = Limits()
"""The limits unless others are given: enough for sites behind one address, too little to shut out others."""


class PathProxy:
    """An ASGI app that forwards requests for the Fleet API to a SuperLink and refuses all others.

    ``superlink``: The SuperLink's address, ``host:port``.
    """

    def __init__(self, superlink: str, client: httpx.AsyncClient, body_bytes: int = Limits.body_bytes) -> None:
        self.superlink = superlink
        self.client = client
        self.body_bytes = body_bytes
        self.warn = _Warnings()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI defines it."""
        if scope["type"] != "http":
            return
        sender = (scope.get("client") or ("an unknown client",))[0]
        if not FLEET_PATH.fullmatch(scope["path"]) or scope["query_string"]:
            self.warn(sender, f"asks for {scope['path'][:100]!r}, which is not for nodes")
            await _respond(send, 403)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in HOP_HEADERS]
        url = f"https://{self.superlink}{scope['path']}"
        body = _body(receive, self.body_bytes)
        request = self.client.build_request(scope["method"], url, headers=headers, content=body)
        try:
            reply = await self.client.send(request, stream=True)
        except _Disconnected:
            return  # the SuperLink discards the incomplete request
        except _TooLarge:
            self.warn(sender, f"sends more than {self.body_bytes} bytes in one request")
            await _respond(send, 413)
            return
        except httpx.HTTPError as error:
            log.warning("the SuperLink at %s does not answer: %s", self.superlink, error)
            await _respond(send, 503)
            return
        forwarded = [(name, value) for name, value in reply.headers.raw if name.lower() not in HOP_HEADERS]
        try:
            await send({"type": "http.response.start", "status": reply.status_code, "headers": forwarded})
            async for part in reply.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            await reply.aclose()
        await send({"type": "http.response.body", "body": b""})


def serve_proxy(listen: str, superlink: str, keys: Path, limits: Limits = USUAL_LIMITS) -> None:
    """Forward nodes' requests to a SuperLink until interrupted.

    ``listen``: The address on which the proxy listens, ``host:port``.
    ``superlink``: The SuperLink's address, ``host:port``.
    ``keys``: The folder with ``ca.crt``, ``superlink.crt`` and ``superlink.key``. The proxy uses the SuperLink's
        certificate.
    ``limits``: What one sender may take from the proxy.
    """
    host, port = split_address(listen)
    require_keys(keys)
    trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
    _allow_many_files()

    async def serve() -> None:
        # No pool: requests that somebody begins and does not end must not keep others waiting for a connection.
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        async with httpx.AsyncClient(verify=trusted, timeout=None, trust_env=False, limits=pool) as client:
            try:
                await start_proxy(host, port, PathProxy(superlink, client, limits.body_bytes), own, limits)
            except OSError as error:
                raise ConfigError(f"cannot listen on {listen}: {error.strerror}.") from None
            while True:
                warn_before_expiry(keys / "superlink.crt", keys / "ca.crt")
                await asyncio.sleep(DAY)

    asyncio.run(serve())


async def start_proxy(
    host: str, port: int, app: PathProxy, context: ssl.SSLContext | None, limits: Limits
) -> asyncio.Server:
    """Start to listen.

    ``port``: The port; 0 for any.
    ``context``: The proxy's certificate; None for clear text, in tests.
    ``limits``: What one sender may take.
    """
    config = uvicorn.Config(
        app,
        http=_HTTP,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,  # a header that a sender wrote does not tell its address
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    config.load()
    state, open_by_address = ServerState(), Counter[str]()

    def connection() -> _Connection:
        return _Connection(_HTTP(config, state, {}, limits=limits), context, limits, open_by_address, app.warn)

    return await asyncio.get_running_loop().create_server(connection, host, port, backlog=2048)


class _Connection(asyncio.Protocol):
    """Counts the connections of an address before anything is read from a new one, and begins TLS."""

    def __init__(
        self,
        http: _HTTP,
        context: ssl.SSLContext | None,
        limits: Limits,
        open_by_address: Counter[str],
        warn: _Warnings,
    ) -> None:
        self.http = http
        self.context = context
        self.limits = limits
        self.open_by_address = open_by_address
        self.warn = warn
        self.handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if self.open_by_address[address] >= self.limits.connections:
            self.warn(address, f"has {self.limits.connections} connections open already")
            transport.abort()
            return
        self.open_by_address[address] += 1
        self.http.on_lost = lambda: self._forget(address)
        if self.context is None:
            transport.set_protocol(self.http)
            self.http.connection_made(transport)
        else:
            transport.pause_reading()  # what comes now is for TLS
            self.handshake = asyncio.get_running_loop().create_task(self._begin_tls(transport, self.context))

    async def _begin_tls(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                transport,
                self.http,
                context,
                server_side=True,
                ssl_handshake_timeout=self.limits.header_seconds,
            )
        except (OSError, ConnectionError):
            encrypted = None  # no TLS, or it took too long
        if encrypted is None:
            transport.abort()
            self.http.on_lost()
        elif not self.http.lost:
            self.http.connection_made(encrypted)

    def _forget(self, address: str) -> None:
        self.http.on_lost = lambda: None  # a failed handshake is told of twice
        self.open_by_address[address] -= 1
        if not self.open_by_address[address]:
            del self.open_by_address[address]


class _HTTP(H11Protocol):
    """uvicorn's HTTP/1.1, whose header is limited, with time-outs for header and body."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: Limits = USUAL_LIMITS,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.limits = limits
        self.timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.lost = False
        self.early = b""  # what came between the end of the handshake and connection_made

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._give(self.limits.header_seconds)
        if self.early:
            self.data_received(self.early)

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            self.early += data
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # within a header, which has one time-out in all
            if self.timer is None:
                self._give(self.limits.header_seconds)
        else:
            self._give(self.limits.body_seconds if self.cycle.more_body else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give(None)
        self.lost = True
        self.on_lost()
        if self.transport is not None:  # None: the connection was lost within the handshake
            super().connection_lost(exc)

    def _give(self, seconds: float | None) -> None:
        """Cut the connection after these seconds; None: never."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if seconds is None else self.loop.call_later(seconds, self._cut)

    def _cut(self) -> None:
        self.transport.abort()


class _Warnings:
    """Logs one warning a minute about an address."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def __call__(self, address: str, text: str) -> None:
        now = time.monotonic()
        if now - self.last.get(address, -WARNING_SECONDS) >= WARNING_SECONDS:
            if len(self.last) > 10_000:
                self.last.clear()
            self.last[address] = now
            log.warning("refused: %s %s", address, text)


class _Disconnected(Exception):
    """The sender disconnected before its request was complete."""


class _TooLarge(Exception):
    """A request's body is larger than allowed."""


async def _body(receive: Receive, most: int) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive, so that memory does not grow with its size."""
    more, size = True, 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        size += len(message.get("body", b""))
        if size > most:
            raise _TooLarge
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _respond(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address.

    ``address``: The address, such as ``0.0.0.0:8000`` or ``[::]:8000``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address such as 0.0.0.0:8000.")
    return host.strip("[]"), int(port)


def require_keys(keys: Path) -> None:
    """Raise `ConfigError` if a folder lacks a file that the proxy needs.

    ``keys``: The folder that `fedkeep.flower.keys.make_keys` wrote.
    """
    missing = [name for name in ("ca.crt", "superlink.crt", "superlink.key") if not (keys / name).is_file()]
    if missing:
        raise ConfigError(f"{keys} holds no {missing[0]}. Make keys with: fedkeep flower keys.")


def _allow_many_files() -> None:
    """Raise this process's limit of open files, of which each connection is one, as far as the system allows."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
