"""A reverse proxy before the SuperLink: it forwards requests for Flower's Fleet API and refuses all others.

Flower 1.41 serves its Fleet API and its Control API on one port, and the Control API has no authentication: whoever
reaches it can register nodes and start runs, and so run code at every site. The SuperLink therefore listens on its
own machine only, and this proxy forwards, unread, what nodes may send. Any web server that filters by path can
replace it.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from fedkeep.errors import ConfigError, MissingExtra

try:
    import httpx
    import uvicorn
except ImportError as error:
    raise MissingExtra("The proxy", "flower") from error

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FLEET_PATH = re.compile(r"/v1/fleet/[a-z-]+")
HOP_HEADERS = {b"connection", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}
"""Headers that concern one connection only, and are not forwarded."""


class PathProxy:
    """An ASGI app that forwards requests for the Fleet API to a SuperLink and refuses all others.

    Parameters
    ----------
    superlink : str
        The SuperLink's address, ``host:port``.
    client : httpx.AsyncClient
        Sends the requests to it.
    """

    def __init__(self, superlink: str, client: httpx.AsyncClient) -> None:
        self.superlink = superlink
        self.client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI defines it."""
        if scope["type"] != "http":
            return
        if not FLEET_PATH.fullmatch(scope["path"]) or scope["query_string"]:
            sender = (scope.get("client") or ("an unknown client",))[0]
            log.warning("refused: %s asks for %r, which is not for nodes", sender, scope["path"][:100])
            await _respond(send, 403)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in HOP_HEADERS]
        url = f"https://{self.superlink}{scope['path']}"
        request = self.client.build_request(scope["method"], url, headers=headers, content=_body(receive))
        try:
            reply = await self.client.send(request, stream=True)
        except _Disconnected:
            return  # the SuperLink discards the incomplete request
        except httpx.HTTPError as error:
            log.warning("the SuperLink at %s does not answer: %s", self.superlink, error)
            await _respond(send, 503)
            return
        forwarded = [(name, value) for name, value in reply.headers.raw if name.lower() not in HOP_HEADERS]
        await send({"type": "http.response.start", "status": reply.status_code, "headers": forwarded})
        async for part in reply.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await reply.aclose()
        await send({"type": "http.response.body", "body": b""})


def serve_proxy(listen: str, superlink: str, keys: Path) -> None:
    """Forward nodes' requests to a SuperLink until interrupted.

    Parameters
    ----------
    listen : str
        The address on which the proxy listens, ``host:port``.
    superlink : str
        The SuperLink's address, ``host:port``.
    keys : Path
        The folder with ``ca.crt``, ``superlink.crt`` and ``superlink.key``. The proxy uses the SuperLink's certificate.

    Raises
    ------
    ConfigError
        If a key is missing, or ``listen`` is not an address.
    """
    host, _, port = listen.rpartition(":")
    missing = [name for name in ("ca.crt", "superlink.crt", "superlink.key") if not (keys / name).is_file()]
    if missing or not port.isdecimal():
        problem = f"{keys} holds no {missing[0]}" if missing else f"{listen!r} is no address such as 0.0.0.0:8000"
        raise ConfigError(f"{problem}. Make keys with: fedkeep flower keys.")
    trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    client = httpx.AsyncClient(verify=trusted, timeout=None, trust_env=False)
    uvicorn.run(
        PathProxy(superlink, client),
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=str(keys / "superlink.crt"),
        ssl_keyfile=str(keys / "superlink.key"),
        lifespan="off",
        log_level="warning",
        limit_concurrency=1000,  # connections: anybody may open some and leave them idle
    )


class _Disconnected(Exception):
    """The sender disconnected before its request was complete."""


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive, so that memory does not grow with its size."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _respond(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
