"""docs/nginx.conf before the SuperLink: what nodes send gets through as it is; all else, and too much, is refused."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx

from fedkeep.flower.keys import make_keys

GUIDE = Path(__file__).parents[2] / "docs" / "nginx.conf"
HEAD = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n"
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


async def answer(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Return a reply's first line; nothing if the connection was closed, a word if it is open and says nothing."""
    try:
        return await asyncio.wait_for(reader.readline(), seconds)
    except TimeoutError:
        return b"waits"
    except ConnectionError:
        return b""


class SuperLink(BaseHTTPRequestHandler):
    """Answers a body with itself."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def unused_ports() -> tuple[int, int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [node_config.getsockname()[1] for node_config in found]
    for node_config in found:
        node_config.close()
    return ports[0], ports[1]


def configuration(folder: Path, port: int, behind: int, connections: int = 64) -> Path:
    """Write keys, and the guide's configuration with other addresses, into a folder."""
    make_keys(folder / "keys", ["a"], ["127.0.0.1"])
    text = GUIDE.read_text()
    for old, new in {
        "0.0.0.0:8000": f"127.0.0.1:{port}",
        "127.0.0.1:8001": f"127.0.0.1:{behind}",
        "limit_conn addresses 64;": f"limit_conn addresses {connections};",
    }.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / "nginx.conf"
    file.write_text(text)
    return file


def test_only_what_nodes_ask_is_passed_on() -> None:
    """What can be seen without nginx: one place passes requests on, all others refuse."""
    locations = GUIDE.read_text().split("location ")[1:]
    assert [location.split(" {")[0] for location in locations] == ['~ "^/v1/fleet/[a-z-]+$"', "/"]
    assert "proxy_pass https://superlink;" in locations[0]
    assert "return 403;" in locations[1]
    assert "proxy_pass" not in locations[1]


@pytest.mark.slow
@needs_nginx
def test_nginx_passes_on_what_nodes_ask_and_withstands_a_flood(tmp_path: Path, unused_ports: tuple[int, int]) -> None:
    port, behind = unused_ports
    file = configuration(tmp_path, port, behind, connections=8)
    keys = tmp_path / "keys"
    superlink = ThreadingHTTPServer(("127.0.0.1", behind), SuperLink)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
    superlink.socket = own.wrap_socket(superlink.socket, server_side=True)
    threading.Thread(target=superlink.serve_forever, daemon=True).start()
    trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    nginx = subprocess.Popen(
        ["nginx", "-p", str(tmp_path), "-c", str(file), "-g", "daemon off;"], stderr=subprocess.PIPE
    )
    try:
        with httpx.Client(verify=trusted, trust_env=False, base_url=f"https://127.0.0.1:{port}") as node:
            for _ in range(50):
                time.sleep(0.1)
                try:
                    reply = node.post("/v1/fleet/pull-messages", content=b"\0\1body")
                    break
                except httpx.ConnectError:
                    continue
            assert (reply.status_code, reply.content) == (200, b"\0\1body")
            for path in ("/v1/control/start-run", "/health", "/v1/fleet/", "/v1/fleet/pull-messages?x=/v1/control"):
                assert node.post(path).status_code == 403, path
            assert "/v1/control/start-run" in (tmp_path / "nginx-refused.log").read_text()
            assert node.post("/v1/fleet/push-object", content=b"x" * 34_000_000).status_code == 413
            assert node.post("/v1/fleet/push-object", headers={"x": "y" * 20_000}).status_code == 400
            asyncio.run(_flood(port, trusted))
            assert node.post("/v1/fleet/pull-messages", content=b"after").content == b"after"
    finally:
        nginx.terminate()
        nginx.wait()
        superlink.shutdown()
        superlink.server_close()


async def _flood(port: int, trusted: ssl.SSLContext) -> None:
    """Open 1,000 half-open requests, and ask as an honest node meanwhile."""
    raw = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(1000)]
    bodies = []
    for _ in range(12):
        pair = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0), ssl=trusted)
        pair[1].write(HEAD + b"content-length: 9\r\n\r\nx")
        bodies.append(pair)
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as node:
        reply = await node.post(f"https://127.0.0.1:{port}/v1/fleet/pull-messages", content=b"honest")
    assert reply.content == b"honest"
    assert {await answer(reader, 15) for reader, _ in raw} == {b""}, "the header's time-out is 10 s"
    message = [await answer(reader, 0.2) for reader, _ in bodies]
    assert message.count(b"waits") == 8, "one address has eight requests at once"
    for _, writer in [*raw, *bodies]:
        writer.close()


@pytest.mark.slow
@needs_nginx
def test_nginx_takes_the_configuration_with_client_certificates(tmp_path: Path, unused_ports: tuple[int, int]) -> None:
    file = configuration(tmp_path, *unused_ports)
    shutil.copy(tmp_path / "keys" / "ca.crt", tmp_path / "sites-ca.crt")
    file.write_text(file.read_text().replace("# ssl_client", "ssl_client").replace("# ssl_verify", "ssl_verify"))
    words = ["nginx", "-p", str(tmp_path), "-t", "-c", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
