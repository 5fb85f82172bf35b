"""`counterctl smockron`: shows throttled identifiers and control messages, and sends accounting messages.

Floor 5 (ARCHITECTURE.md). `throttled` and `domains` ask the admin endpoint, because the protocol has no requests for
their data. The other commands talk to the master as gatekeepers do.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from counterd.cli.ctl.admin import PAGE, admin_options, endpoint_of, show
from counterd.cli.ctl.common import (
    Bytes,
    Group,
    Server,
    address_options,
    chosen_address,
    say,
    shown,
    timeout_below,
    until_interrupted,
)
from counterd.cli.ctl.output import Column, Kind, Output, output_option
from counterd.cli.ctl.smockron.gate import gate
from counterd.protocols.smockron.wire import DOMAIN_MAX, IDENTIFIER_MAX, PORT

if TYPE_CHECKING:
    from counterd.client._addresses import Address

SCHEME = "smockron"
DOMAIN = Bytes("domain", 0, DOMAIN_MAX)
IDENTIFIER = Bytes("identifier", 0, IDENTIFIER_MAX)
LOG_INFO = Bytes("text", 0, 4096)
MOMENT = click.IntRange(0, 10**15)

WATCH_COLUMNS = [
    Column("time", Kind.CLOCK),
    Column("domain", Kind.BYTES),
    Column("identifier", Kind.BYTES),
    Column("word"),
    Column("wait", Kind.SPAN),
    Column("until_ms", Kind.NUMBER, detail=True),
]


class SmockronTarget(Server):
    """The master that the options name."""

    what = "master"
    protocol = "the smockron protocol"

    def __init__(self, address: Address, control: Address | None, timeout: float) -> None:
        super().__init__(address, timeout)
        self._control = control

    @property
    def control(self) -> Address:
        """Returns the address for control messages.

        Raises UsageError if the options name no address for control messages, because not every command needs it.
        """
        if self._control is None:
            raise click.UsageError(
                f"{self.address} has no address for control messages: use --control-port or --control-socket"
            )
        return self._control

    def account(self, *request: Any, **more: Any) -> None:
        """Reports a request to the master. Returns when the master has read the message."""
        from counterd.cli.ctl.smockron.zmtp import Publisher

        with Publisher(self.address, self.timeout) as publisher:
            publisher.account(*request, **more)


pass_target = click.make_pass_decorator(SmockronTarget)
domain_argument = click.argument("domain", type=DOMAIN)
identifier_argument = click.argument("identifier", type=IDENTIFIER)
match_option = click.option(
    "--match", type=Bytes("text", 1, 4096), metavar="TEXT", help="Show only names that contain this text."
)
limit_option = click.option(
    "--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows."
)


@click.group(cls=Group)
@address_options(SCHEME, PORT, "SMOCKRON_URL")
@click.option(
    "--control-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The port for control messages.  [default: port + 1]",
)
@click.option(
    "--control-socket",
    metavar="PATH",
    help="The Unix socket for control messages; --socket needs it.",
)
@output_option
@click.pass_context
def smockron(
    context: click.Context, /, timeout: float, control_port: int | None, control_socket: str | None, **_: object
) -> None:
    """Shows and changes which identifiers a master throttles, and until when."""
    timeout = timeout_below(context, timeout, "master")
    address = chosen_address(context, SCHEME, PORT)
    context.obj = SmockronTarget(address, control_of(address, control_port, control_socket), timeout)


def control_of(address: Address, port: int | None, path: str | None) -> Address | None:
    """Returns the address for control messages: the one of the options, or the server's host with the next port.

    Returns None if there is no next port.
    """
    from counterd.client._addresses import PORT_MAX

    if path:
        return address._replace(host="", port=0, path=path, tls=None)
    port = port or address.port + 1
    return None if address.path or port > PORT_MAX else address._replace(port=port)


# ---- commands that ask the admin endpoint ----


@smockron.command()
@match_option
@limit_option
@admin_options
@output_option
@click.pass_context
def throttled(context: click.Context, /, match: bytes | None, limit: int, output: Output, **where: Any) -> None:
    """Shows the throttled identifiers, beginning with the longest wait. `throttled` asks the admin endpoint."""
    show("throttled", endpoint_of(context, **where), output, match=match, limit=limit)


@smockron.command()
@click.option(
    "--sort",
    type=click.Choice(["told", "accepted", "delayed", "rejected", "identifiers"]),
    default="told",
    help="Sort by this column, in descending order.  [default: told]",
)
@limit_option
@admin_options
@output_option
@click.pass_context
def domains(context: click.Context, /, sort: str, limit: int, output: Output, **where: Any) -> None:
    """Shows the domains with their rules and the numbers of their requests. `domains` asks the admin endpoint.

    interval: the time between two requests at the rate of the domain; 0 if the domain no longer has a rule. burst: how
    many requests can pass faster than that.
    """
    show("domains", endpoint_of(context, **where), output, sort=sort, limit=limit)


# ---- the messages of gatekeepers ----


@smockron.command()
@click.argument("domains", metavar="[DOMAIN]...", nargs=-1, type=DOMAIN)
@output_option
@pass_target
def watch(target: SmockronTarget, domains: tuple[bytes, ...], output: Output) -> None:
    """Shows the control messages of these domains, or of all domains, until Ctrl-C.

    wait: how long the identifier has to wait. The JSON and CSV output also has the end of the wait, in milliseconds of
    Unix time.
    """
    from counterd.cli.ctl.smockron.zmtp import Subscriber

    add = output.stream(WATCH_COLUMNS)
    with until_interrupted(), Subscriber(target.control, target.timeout) as subscriber:
        subscriber.subscribe(*domains)
        while True:
            found = subscriber.next_control()
            now = datetime.now(timezone.utc)
            wait = max(0.0, found.time_ms / 1000 - now.timestamp())
            add((now, found.domain, found.identifier, found.word, wait, found.time_ms))


@smockron.command()
@domain_argument
@identifier_argument
@pass_target
def forget(target: SmockronTarget, domain: bytes, identifier: bytes) -> None:
    """Resets an identifier in the master. Gatekeepers of counterd that are connected to this master reset it too.

    If several masters share their state in a Redis, all of them reset the identifier. Gatekeepers of the other masters
    do not.
    """
    target.account(domain, "FORGET", identifier)
    say(f"asked the master to forget {shown(identifier)} in {shown(domain)}")


@smockron.command()
@domain_argument
@click.argument("status", type=click.Choice(["accepted", "delayed", "rejected"]))
@identifier_argument
@click.option(
    "--time",
    "received_ms",
    type=MOMENT,
    metavar="MS",
    help="The time of the request, in milliseconds of Unix time.  [default: now]",
)
@click.option(
    "--until",
    "delayed_until_ms",
    type=MOMENT,
    metavar="MS",
    help="The end of the delay, in milliseconds of Unix time.",
)
@click.option(
    "--log-info", type=LOG_INFO, default="", metavar="TEXT", help="A text for the master's log; counterd ignores it."
)
@pass_target
def send(
    target: SmockronTarget,
    domain: bytes,
    status: str,
    identifier: bytes,
    received_ms: int | None,
    delayed_until_ms: int | None,
    log_info: bytes,
) -> None:
    """Reports a request to the master, as a gatekeeper does.

    The master sends no reply; `watch` shows its control messages.
    """
    if (status == "delayed") != (delayed_until_ms is not None):
        raise click.UsageError("--until is required if the request was delayed, and not allowed otherwise")
    target.account(
        domain, status.upper(), identifier, received_ms, delayed_until_ms=delayed_until_ms, log_info=log_info
    )


smockron.add_command(gate)
