"""A gate before the SuperLink: what comes from outside gets to Flower's Fleet API, as SuperNodes need, and no further.

Flower 1.41 serves its Fleet API and its Control API on one port, and asks nobody who he is at the second: whoever
reaches it registers nodes and starts runs, which is to run code at every site. The SuperLink therefore listens on its
own machine only, and this passes on, unread, what nodes may send. Any web server that filters by path does the same.
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
    raise MissingExtra("The gate", "flower") from error

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FLEET = re.compile(r"/v1/fleet/[a-z-]+")
OWN = {b"connection", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}  # of one connection, not passed on


class PathProxy:
    """An ASGI app that passes requests for the Fleet API on to a SuperLink and refuses all others.

    Parameters
    ----------
    superlink : its address, ``host:port``. client : how it is reached.
    """

    def __init__(self, superlink: str, client: httpx.AsyncClient) -> None:
        self.superlink = superlink
        self.client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not FLEET.fullmatch(scope["path"]) or scope["query_string"]:
            who = (scope.get("client") or ("somebody",))[0]
            log.warning("refused: %s asks for %r, which is not for nodes", who, scope["path"][:100])
            await _answer(send, 403)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in OWN]
        url = f"https://{self.superlink}{scope['path']}"
        asked = self.client.build_request(scope["method"], url, headers=headers, content=_parts(receive))
        try:
            reply = await self.client.send(asked, stream=True)
        except _Gone:
            return  # half a message is passed on as half a message, which nobody takes
        except httpx.HTTPError as error:
            log.warning("the SuperLink at %s does not answer: %s", self.superlink, error)
            await _answer(send, 503)
            return
        passed = [(name, value) for name, value in reply.headers.raw if name.lower() not in OWN]
        await send({"type": "http.response.start", "status": reply.status_code, "headers": passed})
        async for part in reply.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await reply.aclose()
        await send({"type": "http.response.body", "body": b""})


def serve_proxy(listen: str, superlink: str, keys: Path) -> None:
    """Let nodes through to a SuperLink until interrupted.

    Parameters
    ----------
    listen, superlink : addresses, ``host:port``.
    keys : the folder with ``ca.crt``, ``superlink.crt`` and ``superlink.key``; the gate speaks for the SuperLink.
    """
    host, _, port = listen.rpartition(":")
    missing = [name for name in ("ca.crt", "superlink.crt", "superlink.key") if not (keys / name).is_file()]
    if missing or not port.isdecimal():
        what = f"{keys} holds no {missing[0]}" if missing else f"{listen!r} is no address such as 0.0.0.0:8000"
        raise ConfigError(f"{what}. Make keys with: fedkeep flower keys.")
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
        limit_concurrency=1000,  # connections: strangers may open some and say nothing
    )


class _Gone(Exception):
    """A caller left before all was said."""


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """Yield a body as it comes: whatever its size, none of it is kept here."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
