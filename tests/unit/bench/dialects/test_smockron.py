"""The smockron dialect: requests byte for byte, and the rules that a master needs for a load."""

from __future__ import annotations

import time

from counterd.bench.dialects.smockron import CONTROL_DOMAIN, DOMAIN, MOMENT, requests_of, rules_of
from counterd.bench.plan import Plan, read_work
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.rules import parse_rules
from counterd.protocols.smockron.wire import SocketType, Status


def test_requests_byte_for_byte() -> None:
    requests = requests_of(Plan(protocol="smockron", work=read_work("account")), b"0000abcd")
    for op, domain in {"account": DOMAIN, "control": CONTROL_DOMAIN}.items():
        assert requests[op] == wire.accounting(domain, Status.ACCEPTED, b"0000abcd", int(MOMENT))
        assert len(MOMENT) == len(str(time.time_ns() // 1_000_000)), "it is overwritten with a time"
    assert requests["noop"] == b""
    heard = wire.Parser().feed(b"".join(requests[op] for op in ("greet", "meet", "listen")))
    assert heard == [
        wire.Command(b"READY", wire.ready(SocketType.SUB)[8:]), wire.Command(b"SUBSCRIBE", CONTROL_DOMAIN + b"\0"),
    ]  # fmt: skip


def test_the_rules_that_a_master_needs_for_a_load() -> None:
    rules = parse_rules(rules_of(1, 1000))
    assert list(rules) == [DOMAIN, CONTROL_DOMAIN]
    assert rules[DOMAIN].rounded_ms == (1, 1000)
    assert rules[CONTROL_DOMAIN].burst == (0, 0)
