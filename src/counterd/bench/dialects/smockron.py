"""The smockron protocol for counterbench: its domains, and the rules that a master needs for them.

Floor 5 (ARCHITECTURE.md), pure Python. An accounting message gets no reply. So a PING follows each batch of
messages: its PONG shows that all messages of the batch have been read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from counterd.bench.dialect import NOOP, Dialect, Mistakes, Op, Rules
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import SocketType, Status

if TYPE_CHECKING:
    from counterd.bench.options import Options

DOMAIN = b"counterbench"  # in this domain no request has to wait
CONTROL_DOMAIN = b"counterbench-control"  # in this domain a control message follows each accounting message
MOMENT = b"9" * 13  # stands for a time in milliseconds


def requests_of(_plan: Options, name: bytes) -> dict[str, bytes]:
    """Makes each kind of request for an identifier; noop is a PING. The codec adds times, and PINGs after batches."""
    moment = int(MOMENT)
    return {
        "noop": b"",
        "account": wire.accounting(DOMAIN, Status.ACCEPTED, name, moment),
        "control": wire.accounting(CONTROL_DOMAIN, Status.ACCEPTED, name, moment),
        "greet": wire.greeting(),
        "join": wire.ready(SocketType.PUB),
        "meet": wire.ready(SocketType.SUB),
        "listen": wire.subscribe(wire.topic(CONTROL_DOMAIN)),
    }


def mistakes_of(plan: Options) -> Mistakes:
    """Returns the options that gatekeepers do not support."""
    return [(not plan.keep_alive, "gatekeepers stay connected: do not use --keep-alive 0 with smockron")]


def rules_of(_names: int, maximum: int) -> str:
    """Returns JSON for smockron.rules.

    maximum: how many requests a second each identifier may send, and the size of its burst.
    """
    rules = {DOMAIN: {"rate": f"{maximum}/sec", "burst": maximum}, CONTROL_DOMAIN: {"interval": "100 ms", "burst": 0}}
    return json.dumps({name.decode(): rule for name, rule in rules.items()}, indent=1) + "\n"


DIALECT = Dialect(
    name="smockron",
    order=4,
    port=wire.PORT,
    ops={"noop": NOOP, "account": Op(), "control": Op("control", "new")},
    inner=dict.fromkeys(("greet", "join", "meet", "listen"), Op(names="")),
    work="account",
    ops_help="account (accounting messages; a PING after each batch is answered when the batch has been read), "
    "control (latency is from an accounting message to the control message about it), noop, or a mix without control",
    kind="messages",
    requests=requests_of,
    name_size_max=255,
    opening=("greet", "join"),
    listening=("greet", "meet", "listen"),  # libzmq does not understand a subscription that comes with READY
    mistakes=mistakes_of,
    doubt="does the master have the rules that `counterbench rules --protocol smockron` prints?",
    rules=Rules(
        rules_of,
        "the file has two domains: one for account, with this maximum a second, and one for control.",
    ),
)
