"""`counterctl sentinel`: shows calls in progress and flows, and sends the requests of the protocol.

Floor 5 (ARCHITECTURE.md). `tokens` and `flows` ask the admin endpoint, because the protocol has no requests for their
data. All other commands send requests of the protocol. These commands do not decide locally if the server does not
answer. If the server refuses a request, the command prints one line and exits with status 1.
"""

from __future__ import annotations

import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from counterd.cli.ctl.admin import PAGE, admin_options, endpoint_of, show
from counterd.cli.ctl.common import (
    DURATION,
    Bytes,
    Group,
    Server,
    address_options,
    chosen_address,
    refused,
    say,
    shown,
    timeout_below,
)
from counterd.cli.ctl.holding import held
from counterd.cli.ctl.output import Column, Kind, Output, Row, output_option, span
from counterd.cli.options import ParamType
from counterd.protocols.sentinel.wire import NAMESPACE_MAX, PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client._addresses import Address
    from counterd.client.sentinel import Answer, Client, Hold, Typed

SCHEME = "sentinel"
FLOW = click.IntRange(1, 2**63 - 1)
COUNT = click.IntRange(1, 2**31 - 1)
TOKEN = click.IntRange(-(2**63), 2**63 - 1)
NAMESPACE = Bytes("namespace", 1, NAMESPACE_MAX)
LOOK_S = 0.25  # the time between two checks whether the token is lost

FLOW_COLUMN = Column("flow")
COUNT_COLUMN = Column("count", Kind.NUMBER)
TOKEN_COLUMN = Column("token")


class SentinelTarget(Server):
    """The server of the sentinel protocol."""

    what = "flows"
    protocol = "the sentinel protocol"

    def __init__(self, address: Address, timeout: float, namespace: bytes) -> None:
        super().__init__(address, timeout)
        self.namespace = namespace

    def connect(self) -> Client:
        """Returns a client that is connected and registered in the namespace."""
        from counterd.client.sentinel import Client

        # The client raises the same errors that it logs.
        logging.getLogger("counterd.client.sentinel").addHandler(logging.NullHandler())
        client = Client(**self.arguments, connect_timeout=self.timeout, namespace=self.namespace)
        try:
            client.ping()
        except BaseException:
            client.close()
            raise
        return client


pass_target = click.make_pass_decorator(SentinelTarget)
flow_argument = click.argument("flow_id", metavar="FLOW_ID", type=FLOW)
count_argument = click.argument("count", type=COUNT, default=1)
# Half of all tokens are negative, and look like options.
token_command: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}
token_argument = click.argument("token", type=TOKEN)
limit_option = click.option(
    "--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows."
)


@click.group(cls=Group)
@address_options(SCHEME, PORT, "SENTINEL_URL")
@click.option(
    "--namespace",
    type=NAMESPACE,
    default="default",
    help="The namespace in which this connection is registered.  [default: default]",
)
@output_option
@click.pass_context
def sentinel(context: click.Context, /, timeout: float, namespace: bytes, **_: object) -> None:
    """Shows flows, asks whether calls may pass, and acquires and releases tokens."""
    timeout = timeout_below(context, timeout, "flows")
    context.obj = SentinelTarget(chosen_address(context, SCHEME, PORT), timeout, namespace)


# ---- commands that ask the admin endpoint ----


@sentinel.command()
@click.option("--flow", type=FLOW, metavar="ID", help="Show only tokens of this flow.")
@click.option(
    "--sort",
    type=click.Choice(["held", "count"]),
    default="held",
    help="Sort by this column, in descending order.  [default: held]",
)
@limit_option
@admin_options
@output_option
@click.pass_context
def tokens(context: click.Context, /, flow: int | None, sort: str, limit: int, output: Output, **where: Any) -> None:
    """Shows the calls in progress: how long each call has run, and which connection holds its token.

    left: the remaining time of the lease of the token. The token of a connection that is gone ends with its lease,
    unless another client renews the lease. `counterctl kill` accepts the IDs in the column connection. `tokens` asks
    the admin endpoint.
    """
    show("tokens", endpoint_of(context, **where), output, flow=flow, sort=sort, limit=limit)


@sentinel.command()
@click.option(
    "--sort",
    type=click.Choice(["now", "passed", "blocked", "expired"]),
    default="now",
    help="Sort by this column, in descending order.  [default: now]",
)
@limit_option
@admin_options
@output_option
@click.pass_context
def flows(context: click.Context, /, sort: str, limit: int, output: Output, **where: Any) -> None:
    """Shows the flows: their thresholds, how much of each threshold is in use, and the numbers of calls.

    expired: how many calls did not end before their lease expired. `flows` asks the admin endpoint.
    """
    show("flows", endpoint_of(context, **where), output, sort=sort, limit=limit)


# ---- requests of the protocol ----


@sentinel.command()
@click.argument("namespace", type=NAMESPACE, required=False)
@output_option
@pass_target
def ping(target: SentinelTarget, namespace: bytes | None, output: Output) -> None:
    """Shows how many connections are registered in a namespace, including this one."""
    if namespace is not None:
        target.namespace = namespace
    with target.connect() as client:
        begun = time.perf_counter()
        connected = client.ping()
        took = time.perf_counter() - begun
    add = output.stream(
        [Column("namespace", Kind.BYTES), Column("connected", Kind.NUMBER), Column("seconds", Kind.SPAN)],
        lambda row: f"{target.address} answered in {span(row[2])}: {row[1]:,} connected in namespace {shown(row[0])}",
    )
    add((target.namespace, connected, took))


def ask(target: SentinelTarget, flow_id: int, count: int, output: Output, question: Callable[[Client], Answer]) -> None:
    """Asks the server whether calls may pass, and shows the reply.

    If the calls have to wait, returns after the wait.
    """
    what = f"{count:,} of flow {flow_id}"
    with target.connect() as client:
        answer = question(client)
    if not answer.passed:
        refused(f"blocked: {what}")

    def sentence(row: Row) -> str:
        if row[4]:
            return f"passed: {what}, after a wait of {span(row[4])}"
        return f"passed: {what}" + ("" if row[3] is None else f", {row[3]:,} more can pass now")

    columns = [
        FLOW_COLUMN,
        COUNT_COLUMN,
        Column("status"),
        Column("remaining", Kind.NUMBER),
        Column("wait_seconds", Kind.SPAN),
    ]
    status = "should wait" if answer.wait_ms else "ok"
    remaining = None if answer.remaining < 0 else answer.remaining
    output.stream(columns, sentence)((str(flow_id), count, status, remaining, answer.wait_ms / 1000))
    time.sleep(answer.wait_ms / 1000)


@sentinel.command()
@flow_argument
@count_argument
@click.option(
    "--prioritized",
    is_flag=True,
    help="If the calls cannot pass now, reserve the next time window for them, and wait until it begins.",
)
@output_option
@pass_target
def flow(target: SentinelTarget, flow_id: int, count: int, prioritized: bool, output: Output) -> None:
    """Asks the server whether COUNT calls of a flow may pass (default 1). The exit status is 1 if the calls are
    blocked.

    The server counts these calls. If the calls have to wait, the command waits.
    """
    ask(target, flow_id, count, output, lambda client: client.flow(flow_id, count, prioritized=prioritized))


def truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


# The words before the colon of a value: the name of the tag, and the function that reads the rest.
TYPES: dict[bytes, tuple[str, Callable[[str], bool | int | float]]] = {
    b"int": ("INTEGER", int),
    b"long": ("LONG", int),
    b"short": ("SHORT", int),
    b"byte": ("BYTE", int),
    b"double": ("DOUBLE", float),
    b"float": ("FLOAT", float),
    b"bool": ("BOOLEAN", truth),
}


class ParamValue(ParamType):
    """The value of a parameter: a text, or a type, a colon and a value, such as int:5."""

    name = "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Typed:
        from counterd.client.sentinel import Tag, Typed

        if isinstance(value, Typed):
            return value
        given = os.fsencode(value)
        kind, colon, rest = given.partition(b":")
        if not colon or kind not in {*TYPES, b"text"}:
            return Typed(Tag.STRING, given)
        if kind == b"text":
            return Typed(Tag.STRING, rest)
        tag, read = TYPES[kind]
        try:
            return Typed(Tag[tag], read(rest.decode()))
        except ValueError:
            self.fail(f"{shown(given)} is not a valid {kind.decode()}", param, ctx)


@sentinel.command()
@flow_argument
@click.argument("values", metavar="VALUE...", nargs=-1, required=True, type=ParamValue())
@output_option
@pass_target
def param(target: SentinelTarget, flow_id: int, values: tuple[Typed, ...], output: Output) -> None:
    """Asks the server whether a call with these parameter values may pass. The exit status is 1 if the call is blocked.

    Write a VALUE as a text, or as int:5, long:5, short:5, byte:5, double:0.5, float:0.5 or bool:true. text:int:5 is the
    text int:5.
    """
    ask(target, flow_id, 1, output, lambda client: client.param(flow_id, values))


@sentinel.command()
@flow_argument
@count_argument
@click.option("--for", "duration", type=DURATION, help="How long to hold the token; 0 gives it back immediately.")
@output_option
@pass_target
def acquire(target: SentinelTarget, flow_id: int, count: int, duration: float | None, output: Output) -> None:
    """Takes a token for COUNT calls of a flow (default 1), holds it until Ctrl-C or SIGTERM, and gives it back.

    The option --for ends the hold earlier. The command renews the lease while it holds the token.

    The exit status is 1 if the flow is blocked, 3 if the token is lost.
    """
    what = f"{count:,} of flow {flow_id}"
    until = " until Ctrl-C" if duration is None else f" for {span(duration)}"

    def enter(client: Client) -> Hold:
        return client.hold(flow_id, count, timeout=0)

    with held(target, enter, [what], why=lambda *_: f"blocked: {what}") as (_, hold):
        assert hold.token is not None
        output.stream(
            [FLOW_COLUMN, COUNT_COLUMN, TOKEN_COLUMN], lambda row: f"acquired {what} (token {row[2]}){until}"
        )((str(flow_id), count, str(hold.token.id)))
        wait(hold, duration)


def wait(hold: Hold, duration: float | None) -> None:
    """Waits for a duration in seconds. None means for ever. Raises TokenLost if the token is lost before the end."""
    deadline = math.inf if duration is None else time.monotonic() + duration
    while (left := deadline - time.monotonic()) > 0:
        hold.raise_if_lost()
        time.sleep(min(left, LOOK_S))


def no_token(token: int) -> NoReturn:
    refused(f"no token {token}: it was released before, or its lease has expired")


@sentinel.command(**token_command)
@token_argument
@pass_target
def release(target: SentinelTarget, token: int) -> None:
    """Releases a token, no matter which connection holds it. The exit status is 1 if the token does not exist.

    The call of the token continues, but is no longer counted.
    """
    from counterd.client.sentinel import NoSuchRule, Token

    with target.connect() as client:
        try:
            released = client.release(Token(token, 0, 0))
        except NoSuchRule:
            say(f"released token {token}; its rule no longer exists")
            return
    if not released:
        no_token(token)


@sentinel.command(**token_command)
@token_argument
@output_option
@pass_target
def keep(target: SentinelTarget, token: int, output: Output) -> None:
    """Renews the lease of a token, and shows the remaining time of the lease. The exit status is 1 if the token does
    not exist.

    The token then belongs to the connection of this command, and the connection ends with the command. So the token
    ends after the clientOfflineTime of its rule, unless its client renews the lease before that.
    """
    from counterd.client.sentinel import NoSuchRule, Token, TokenLost

    with target.connect() as client:
        try:
            left = client.keep(Token(token, 0, 0)) / 1000
        except TokenLost:
            no_token(token)
        except NoSuchRule as error:
            error.name = b"token %d" % token
            raise
    add = output.stream(
        [TOKEN_COLUMN, Column("left", Kind.SPAN)], lambda row: f"token {row[0]} is leased for {span(row[1])} more"
    )
    add((str(token), left))
