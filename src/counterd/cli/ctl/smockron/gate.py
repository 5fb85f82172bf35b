"""`counterctl smockron gate`: a gatekeeper that proxies ask over HTTP.

Floor 5 (ARCHITECTURE.md). This file has the options, serving.py has the server, and answers.py makes the replies.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import click

from counterd.cli.ctl.common import DURATION, Bytes, refused, say
from counterd.cli.options import Reads

if TYPE_CHECKING:
    from counterd.cli.ctl.smockron import SmockronTarget
    from counterd.client._addresses import Address

DEFAULT = "127.0.0.1:10006"


def read_listen(text: str) -> tuple[str, int]:
    from counterd.control.config.keys import admin_bind, split_bind

    return split_bind(admin_bind(text))


def read_rejected(text: str) -> str | float:
    try:
        return text if text in ("all", "none") else float(text)
    except ValueError:
        raise ValueError(f"expected all, none or a share such as 0.1, not {text!r}") from None


@click.command()
@click.option(
    "--listen",
    type=Reads("address", read_listen),
    default=DEFAULT,
    metavar="HOST:PORT",
    help=f"The address on which the gatekeeper listens for proxies, or unix:/PATH.  [default: {DEFAULT}]",
)
@click.option(
    "--domain",
    type=Bytes("domain", 0, 255),
    default="default",
    help=("The domain of the requests.  [default: default]"),
)
@click.option(
    "--identifier",
    "identifiers",
    multiple=True,
    default=("header:X-Real-IP",),
    metavar="WHAT",
    help=(
        "What identifies the sender of a request: header:NAME, path, or client (the peer's address). If this "
        "option is repeated, all values together are the identifier.  [default: header:X-Real-IP]"
    ),
)
@click.option(
    "--max-delay",
    type=DURATION,
    default=5.0,
    help="Reject a request if it would have to wait longer than this.  [default: 5s]",
)
@click.option(
    "--max-delayed",
    type=click.IntRange(0),
    default=1000,
    metavar="N",
    help="Let at most N requests wait, and reject additional requests.  [default: 1000]",
)
@click.option(
    "--rejected",
    type=Reads("share", read_rejected),
    default="all",
    metavar="all|none|SHARE",
    help="Which rejected requests are reported to the master.  [default: all]",
)
@click.option(
    "--rejected-status",
    type=click.IntRange(400, 599),
    default=503,
    metavar="STATUS",
    help="The HTTP status for a rejected request; nginx and Envoy need 403.  [default: 503]",
)
@click.pass_obj
def gate(
    target: SmockronTarget,
    listen: tuple[str, int],
    domain: bytes,
    identifiers: tuple[str, ...],
    max_delay: float,
    max_delayed: int,
    rejected: Any,
    rejected_status: int,
) -> None:
    """Runs a gatekeeper: nginx, Traefik, Caddy, Envoy or another proxy asks it over HTTP whether each request may pass.

    If the request may pass, the reply has status 200. If the request has to wait, this reply comes after the wait. If
    the request is rejected, the reply has the status --rejected-status and the header Retry-After. A request without
    the header that --identifier names passes without a limit; the gatekeeper logs the first such request. The path is
    the header X-Forwarded-Uri, or X-Original-URI, or the path of the request itself, unchanged. A client can send any
    header, so use only headers that the proxy overwrites.

    The gatekeeper needs aiohttp (the extra admin). deploy/ has configuration files for the proxies. After SIGTERM or
    SIGINT the gatekeeper answers the waiting requests and then ends.
    """
    if importlib.util.find_spec("aiohttp") is None:
        refused("gate needs aiohttp: in the source tree, run `make setup` or pip install '.[admin]'")
    import uvloop

    from counterd.cli.ctl.smockron.answers import Gate
    from counterd.cli.ctl.smockron.serving import Serving, listening_at
    from counterd.client.smockron import AsyncGatekeeper

    logging.basicConfig(format="counterctl: %(message)s", level=logging.WARNING)
    logging.getLogger("counterd.client.smockron").setLevel(logging.INFO)  # also reports that the master is back
    masters = (url_of(target.address), url_of(target.control))
    options = {"max_delay_s": max_delay, "max_delayed": max_delayed, "rejected": rejected, "timeout": target.timeout}
    gatekeeper = AsyncGatekeeper(masters, domain, **options)
    serving = Serving(gatekeeper, Gate(gatekeeper, identifiers, rejected_status), max_delay, max_delayed)
    with listening_at(*listen) as listening:
        uvloop.run(serving.run(listening))
    said = gatekeeper.stats()._asdict()
    say(", ".join(f"{name} {said[name]}" for name in ("passed", "delayed", "rejected", "told", "sent", "dropped")))


def url_of(address: Address) -> str:
    """Returns an address as a URL for a gatekeeper."""
    if address.path:
        return f"smockron+unix://{quote(os.fsencode(address.path))}"
    if address.tls is None:
        return f"smockron://{address}"
    assert isinstance(address.tls, tuple)
    files = urlencode({name: file for name, file in address.tls._asdict().items() if file})
    return f"smockrons://{address}{'?' if files else ''}{files}"
