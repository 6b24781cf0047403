"""The proxy: what nodes send gets through as it is, everything else is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("flwr")

import httpx

from fedkeep.flower.path_proxy import PathProxy


class Body(httpx.AsyncByteStream):
    """A reply that comes in two parts."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"reply"
        yield b"\2"


def through(path: str, superlink: httpx.AsyncBaseTransport, raw: bytes | None = None) -> httpx.Response:
    """Send a request to the proxy, as a node would."""

    async def ask() -> httpx.Response:
        proxy = PathProxy("127.0.0.1:8001", httpx.AsyncClient(transport=superlink))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy)) as node:
            request = node.build_request(
                "POST", "https://fl.example.org:8000/", content=b"\0\1body", headers={"x-key": "k"}
            )
            request.url = request.url.copy_with(raw_path=raw or path.encode())
            return await node.send(request)

    return asyncio.run(ask())


def test_what_nodes_send_gets_through() -> None:
    seen: list[httpx.Request] = []

    def superlink(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, stream=Body(), headers={"x-own": "v", "content-type": "application/x"})

    reply = through("/v1/fleet/pull-messages", httpx.MockTransport(superlink))
    assert (reply.status_code, reply.content, reply.headers["x-own"]) == (201, b"reply\2", "v")
    assert str(seen[0].url) == "https://127.0.0.1:8001/v1/fleet/pull-messages"
    assert (seen[0].content, seen[0].headers["x-key"], seen[0].method) == (b"\0\1body", "k", "POST")
    assert seen[0].headers["host"] == "127.0.0.1:8001"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/register-node",
        "/v1/runtime/push-messages",
        "/health",
        "/",
        "/v1/fleet/",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages?x=/v1/control",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages%0d%0a",
    ],
)
def test_everything_else_is_refused(path: str) -> None:
    def superlink(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.url} got through")

    assert through(path, httpx.MockTransport(superlink)).status_code == 403


def test_a_superlink_that_is_away_is_told_as_such() -> None:
    def superlink(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert through("/v1/fleet/pull-messages", httpx.MockTransport(superlink)).status_code == 503
