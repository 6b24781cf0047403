"""The configuration of nginx as the proxy before the SuperLink: it passes nodes' requests on, with limits."""

from __future__ import annotations

import re
from pathlib import Path

from fedkeep.errors import ConfigError
from fedkeep.flower.path_proxy import USUAL_LIMITS, Limits, require_keys, split_address

TEMPLATE = """\
# nginx before Flower's SuperLink. It passes on what nodes ask (/v1/fleet) and refuses all else.
# Start it: nginx -c {file}
worker_processes 2;
worker_rlimit_nofile 32768;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;

events {{
    worker_connections 16384;
}}

http {{
    access_log off;
    server_tokens off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/replies;
    fastcgi_temp_path {folder}/unused;
    uwsgi_temp_path {folder}/unused;
    scgi_temp_path {folder}/unused;

    limit_conn_zone $binary_remote_addr zone=addresses:10m;
    limit_conn addresses {connections};
    limit_conn_status 429;
    limit_conn_log_level info;

    upstream superlink {{
        server {superlink};
        keepalive 16;
    }}

    server {{
        listen {listen} ssl backlog=2048;
        ssl_certificate {keys}/superlink.crt;
        ssl_certificate_key {keys}/superlink.key;
        ssl_protocols TLSv1.2 TLSv1.3;
{client_certificates}
        client_header_timeout {header_seconds:g}s;
        client_header_buffer_size 4k;
        large_client_header_buffers 4 {header_kilobytes}k;
        client_max_body_size {body_bytes};
        client_body_timeout {body_seconds:g}s;
        send_timeout 60s;
        reset_timedout_connection on;

        location ~ "^/v1/fleet/[a-z-]+$" {{
            if ($request_uri !~ "^/v1/fleet/[a-z-]+$") {{
                return 403;
            }}
            proxy_pass https://superlink;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_ssl_trusted_certificate {keys}/ca.crt;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_read_timeout 300s;
            proxy_next_upstream off;
        }}

        location / {{
            return 403;
        }}
    }}
}}
"""
CLIENT_CERTIFICATES = """\
        ssl_client_certificate {authority};
        ssl_verify_client on;
"""
_SAFE_PATH = re.compile(r"[\w./+@=-]+")


def nginx_configuration(
    file: Path,
    listen: str,
    superlink: str,
    keys: Path,
    client_authority: Path | None = None,
    limits: Limits = USUAL_LIMITS,
) -> str:
    """Return the configuration.

    ``file``: Where the configuration will stand. nginx's log and temporary files are put beside it.
    ``listen``: The address on which nginx listens, ``host:port``.
    ``superlink``: The SuperLink's address, ``host:port``.
    ``keys``: The folder with ``ca.crt``, ``superlink.crt`` and ``superlink.key``.
    ``client_authority``: The certificate of an authority. Only who shows a certificate that it signed can connect then.
    ``limits``: What one sender may take.
    """
    split_address(listen)
    split_address(superlink)
    require_keys(keys)
    for path in filter(None, (file, keys, client_authority)):
        if not _SAFE_PATH.fullmatch(str(path.resolve())):
            raise ConfigError(f"{path.resolve()} has characters that nginx would not take as a path. Choose another.")
    if client_authority is not None and not client_authority.is_file():
        raise ConfigError(f"{client_authority} is missing, which is to sign the sites' certificates.")
    asked = "" if client_authority is None else CLIENT_CERTIFICATES.format(authority=client_authority.resolve())
    return TEMPLATE.format(
        file=file.resolve(),
        folder=file.resolve().parent,
        listen=listen,
        superlink=superlink,
        keys=keys.resolve(),
        client_certificates=asked,
        connections=limits.connections,
        header_seconds=limits.header_seconds,
        header_kilobytes=limits.header_bytes // 1024,
        body_bytes=limits.body_bytes,
        body_seconds=limits.body_seconds,
    )
