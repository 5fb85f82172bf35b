"""nginx and Caddy with the files of deploy/, in front of an application, and the `counterctl smockron gate` that they
ask about each request.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import daemon, gates, needs
from kit.machine import PATIENCE, own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.daemon import Address, Daemon

DEPLOY = Path(__file__).parents[2] / "deploy"
COUNTERCTL = str(Path(sys.executable).with_name("counterctl"))
GATE, APPLICATION = "127.0.0.1:10006", "127.0.0.1:8000"  # in those files


@contextlib.contextmanager
def gate(master: Daemon, *options: str, listen: str = "127.0.0.1:0") -> Iterator[Daemon]:
    """Runs `counterctl smockron gate`, which asks the master, during the block."""
    address, control = gates.addresses(master)
    url = f"smockron://{address.host}:{address.port}"
    group = [COUNTERCTL, "smockron", "--url", url, "--control-port", str(control.port)]
    with daemon.started([*group, "gate", "--listen", listen, *options]) as running:
        running.wait_for_log("listens on")
        yield running


class Application(http.server.BaseHTTPRequestHandler):
    """Answers 200, but 403 for /forbidden."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class Queue(http.server.ThreadingHTTPServer):
    request_queue_size = 1024


@contextlib.contextmanager
def application() -> Iterator[int]:
    """Serves the application during the block. Yields its port."""
    with Queue(("127.0.0.1", 0), Application) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(where: Address, path: str = "/", client: str = "127.0.0.1", body: bytes | None = None, **fields: str) -> Any:
    """Makes a request from an address, with a forged X-Real-IP. Returns (status, Retry-After or None).

    fields: more headers.
    """
    asking = http.client.HTTPConnection(*where, timeout=PATIENCE, source_address=(client, 0))
    with contextlib.closing(asking):
        asking.request("GET" if body is None else "POST", path, body, {"X-Real-IP": "192.0.2.1", **fields})
        answer = asking.getresponse()
        answer.read()
        return answer.status, answer.headers["Retry-After"]


def free_address(host: str = "") -> Address:
    """Returns a free address, which stays free if the host is own_address()."""
    with socket.create_server((host or own_address(), 0)) as probe:
        return daemon.Address(*probe.getsockname())


@contextlib.contextmanager
def nginx(directory: Path, gate: Address, change: Callable[[str], str] = str, host: str = "") -> Iterator[Address]:
    """Runs nginx with deploy/nginx/counterd.conf, to which `change` may add. host: an address to listen on."""
    where = free_address(host)
    with application() as port:
        text = (DEPLOY / "nginx" / "counterd.conf").read_text("utf-8")
        for old, new in ((GATE, f"{gate.host}:{gate.port}"), (APPLICATION, f"127.0.0.1:{port}")):
            assert text.count(old) == 1
            text = text.replace(old, new)
        text = change(text.replace("listen 80;", f"listen {where.host}:{where.port};"))
        paths = "".join(
            f"{name}_temp_path {directory};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = directory / "nginx.conf"
        config.write_text(
            f"daemon off;\nmaster_process off;\npid {directory}/nginx.pid;\nerror_log stderr notice;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{paths}{text}}}\n"
        )
        with daemon.started([needs.path("nginx"), "-p", directory, "-c", config, "-e", "stderr"]):
            daemon.wait_until(lambda: _listens(where), "nginx")
            yield where


@contextlib.contextmanager
def caddy(directory: Path, gate: Address, change: Callable[[str], str] = str) -> Iterator[Address]:
    """Runs Caddy with deploy/caddy/Caddyfile, which `change` may change."""
    where = free_address()
    with application() as port:
        text = (DEPLOY / "caddy" / "Caddyfile").read_text("utf-8")
        assert (text.count(GATE), text.count(APPLICATION)) == (1, 2)
        text = text.replace(GATE, f"{gate.host}:{gate.port}").replace(APPLICATION, f"127.0.0.1:{port}")
        text = text.replace("\n{\n", "\n{\n\tadmin off\n").replace(
            "\n:80 {", f"\n:{where.port} {{\n\tbind {where.host}"
        )
        config = directory / "Caddyfile"
        config.write_text(change(text))
        home = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(directory))
        with daemon.started([needs.path("caddy"), "run", "--config", config, "--adapter", "caddyfile"], env=home):
            daemon.wait_until(lambda: _listens(where), "caddy")
            yield where


def _listens(where: Address) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(where, PATIENCE):
        return True
    return False


def figures(master: Daemon) -> dict[str, Any]:
    """Returns the figures of the domain "default" from the master's admin endpoint."""
    admin = master.address_of("admin")
    asking = http.client.HTTPConnection(*admin, timeout=PATIENCE)
    with contextlib.closing(asking):
        asking.request("GET", "/domains")
        rows = json.loads(asking.getresponse().read())["rows"]
    return next((row for row in rows if row["domain"] == "default"), {"accepted": 0, "delayed": 0, "rejected": 0})
