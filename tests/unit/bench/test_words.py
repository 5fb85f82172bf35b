"""Requests, as bytes; what is in the requests that are sent is in tests/functional/test_counterbench.py."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from counterd.bench import scripts
from counterd.bench.domains import CONTROL_DOMAIN, DOMAIN, domain_rules
from counterd.bench.plan import Plan, Work
from counterd.bench.words import MOMENT, TOKEN, names_of, requests_of
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.rules import parse_rules
from counterd.protocols.smockron.wire import SocketType, Status


def test_counter() -> None:
    plan = Plan(resources=3, maximum=0x01020304)
    assert requests_of(plan, b"jobs") == {
        "noop": bytes.fromhex("90 00 00 00 00000000 00000000"),
        "get": bytes.fromhex("90 01 00 00 00000006 00000000 0004") + b"jobs",
        "acquire": bytes.fromhex("90 02 00 00 0000000e 00000000 00000003 01020304 0004") + b"jobs",
        "release": bytes.fromhex("90 03 00 00 0000000a 00000000 00000003 0004") + b"jobs",
    }


def test_redis() -> None:
    assert requests_of(Plan(protocol="redis"), b"jobs") == {
        "noop": b"*1\r\n$4\r\nPING\r\n",
        "get": b"*2\r\n$3\r\nGET\r\n$4\r\njobs\r\n",
        "acquire": b"*2\r\n$4\r\nINCR\r\n$4\r\njobs\r\n",
        "release": b"*2\r\n$4\r\nDECR\r\n$4\r\njobs\r\n",
        "query": b"*2\r\n$3\r\nGET\r\n$4\r\njobs\r\n",
        "update": b"*3\r\n$6\r\nINCRBY\r\n$4\r\njobs\r\n$1\r\n1\r\n",
        "lower": b"*3\r\n$6\r\nDECRBY\r\n$4\r\njobs\r\n$1\r\n1\r\n",
        "insert": b"*5\r\n$3\r\nSET\r\n$4\r\njobs\r\n$1\r\n0\r\n$2\r\nPX\r\n$3\r\n100\r\n",
        "purge": b"*2\r\n$3\r\nDEL\r\n$4\r\njobs\r\n",
        "set": b"*3\r\n$3\r\nSET\r\n$4\r\njobs\r\n$100\r\n" + b"v" * 100 + b"\r\n",
        "fetch": b"*2\r\n$3\r\nGET\r\n$4\r\njobs\r\n",
        "fill": b"*3\r\n$3\r\nSET\r\n$4\r\njobs\r\n$1\r\n0\r\n",
    }
    many = requests_of(Plan(protocol="redis", resources=12), b"jobs")
    assert many["acquire"] == b"*3\r\n$6\r\nINCRBY\r\n$4\r\njobs\r\n$2\r\n12\r\n"
    assert many["release"] == b"*3\r\n$6\r\nDECRBY\r\n$4\r\njobs\r\n$2\r\n12\r\n"


def test_throttr() -> None:
    plan = Plan(protocol="throttr", work=Work.read("query"), number_type="uint32", ttl=1.5, value_size=3)
    assert requests_of(plan, b"jobs") == {
        "noop": b"\x18",
        "query": b"\x02\x04jobs",
        "update": bytes.fromhex("03 00 01 01000000 04") + b"jobs",
        "lower": bytes.fromhex("03 00 02 01000000 04") + b"jobs",
        "insert": bytes.fromhex("01 00000000 03 dc050000 04") + b"jobs",
        "purge": b"\x04\x04jobs",
        "set": bytes.fromhex("05 06 64000000 04 03000000") + b"jobsvvv",
        "fetch": b"\x06\x04jobs",
        "fill": bytes.fromhex("01 00000000 06 64000000 04") + b"jobs",
        "clear": b"\x04\x04jobs",
    }


@pytest.mark.parametrize(("number_type", "size"), [("uint8", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8)])
def test_numbers_of_throttr(number_type: str, size: int) -> None:
    plan = Plan(protocol="throttr", work=Work.read("query"), number_type=number_type)
    found = requests_of(plan, b"jobs")
    assert [len(found[op]) for op in ("update", "insert", "set")] == [8 + size, 7 + 2 * size, 107 + 2 * size]


def test_names_of_numbers_of_buffers_and_of_what_is_new() -> None:
    plan = Plan(protocol="throttr", work=Work.read("query"))
    expected = {"": b"nnnnnnnn", "set": b"bbbbbbbb", "fetch": b"bbbbbbbb", "insert": b"i4321000", "purge": b"i4321000"}
    assert names_of(plan, 0xF0001234) == expected
    assert names_of(replace(plan, name_size=11), 0x1234)["insert"] == b"i43"
    assert set(names_of(replace(plan, name_size=8), 0x1234).values()) == {b""}
    told = Plan(protocol="smockron", work=Work.read("control"))
    assert names_of(told, 0xF0001234) == {"": b"nnnnnnnn", "control": b"i4321000"}


def test_memcached() -> None:
    assert requests_of(Plan(protocol="memcached", resources=12), b"jobs") == {
        "noop": b"mn\r\n",
        "get": b"get jobs\r\n",
        "acquire": b"incr jobs 12\r\n",
        "release": b"decr jobs 12\r\n",
        "fill": b"set jobs 0 0 1\r\n0\r\n",
    }


def test_sentinel() -> None:
    """Numbers of flows and tokens are put in later; those of a flow are counted on from these."""
    assert requests_of(Plan(protocol="sentinel", resources=3), b"jobs") == {
        "noop": bytes.fromhex("0015 00000000 00 0000000c") + b"counterbench",
        "acquire": bytes.fromhex("0012 00000000 03 0000000000000001 00000003 00"),
        "release": bytes.fromhex("000d 00000000 04 0000000000000000"),
        "keep": bytes.fromhex("000d 00000000 05 0000000000000000"),
        "flow": bytes.fromhex("0012 00000000 01 00000000000f4241 00000003 00"),
        "param": bytes.fromhex("001e 00000000 02 0000000000000001 00000003 00000001 07 00000004") + b"jobs",
    }
    longest = requests_of(Plan(protocol="sentinel", work=Work.read("param"), name_size=996), b"x" * 996)
    assert len(longest["param"]) == 1024


def test_scripts() -> None:
    def evalsha(script: str, name: bytes, *numbers: bytes) -> bytes:
        return scripts.resp(b"EVALSHA", scripts.digest(script), b"1", name, *numbers)

    assert requests_of(Plan(protocol="redis-lua", maximum=12), b"jobs") == {
        "noop": b"*1\r\n$4\r\nPING\r\n",
        "acquire": evalsha("acquire", b"held:jobs", b"12", b"4000", TOKEN),
        "release": b"*3\r\n$4\r\nZREM\r\n$9\r\nheld:jobs\r\n$16\r\n" + TOKEN + b"\r\n",
        "flow": evalsha("flow", b"flow:jobs", b"12", b"1000"),
        "counts": evalsha("counts", b"counts:jobs", b"12", b"1000"),
    }


@pytest.mark.parametrize("protocol", ["counter", "throttr", "sentinel", "redis", "redis-lua", "memcached", "smockron"])
def test_requests_of_one_kind_differ_in_their_name_alone(protocol: str) -> None:
    """Which is what a load process builds on."""
    work = Work.read("noop")
    plan = Plan(protocol=protocol, resources=7, work=work)
    for first, second in zip(requests_of(plan, b"aaaa").values(), requests_of(plan, b"bbbb").values(), strict=True):
        assert first.replace(b"aaaa", b"bbbb") == second
        assert first.count(b"aaaa") <= 1


def test_beanstalk() -> None:
    plan = Plan(protocol="beanstalk", work=Work.read("cycle"), value_size=12)
    assert requests_of(plan, b"0000abcd") == {
        "noop": b"list-tube-used\r\n",
        "put": b"put 65536 0 3600 12\r\n0000abcdvvvv\r\n",
        "reserve": b"reserve-with-timeout 5\r\n",
        "delete": b"delete ",
        "use": b"use 0000abcd\r\n",
        "watch": b"watch 0000abcd\r\n",
        "ignore": b"ignore default\r\n",
    }
    assert requests_of(replace(plan, value_size=3, delay=7), b"0000abcd")["put"] == b"put 65536 7 3600 3\r\n000\r\n"
    assert requests_of(replace(plan, delay=7), b"0000abcd")["reserve"] == b"reserve-with-timeout 12\r\n"
    fan = requests_of(replace(plan, work=Work.read("fan"), value_size=25), b"0000abcd")
    assert fan["put"] == b"put 65536 0 3600 25\r\n0000abcd" + TOKEN + b"v\r\n"
    assert fan["reserve"] == b"reserve\r\n"


def test_smockron() -> None:
    requests = requests_of(Plan(protocol="smockron", work=Work.read("account")), b"0000abcd")
    for op, domain in {"account": DOMAIN, "control": CONTROL_DOMAIN}.items():
        assert requests[op] == wire.accounting(domain, Status.ACCEPTED, b"0000abcd", int(MOMENT))
        assert len(MOMENT) == len(str(time.time_ns() // 1_000_000)), "it is overwritten with a time"
    assert requests["noop"] == b""
    heard = wire.Parser().feed(b"".join(requests[op] for op in ("greet", "meet", "listen")))
    assert heard == [
        wire.Command(b"READY", wire.ready(SocketType.SUB)[8:]), wire.Command(b"SUBSCRIBE", CONTROL_DOMAIN + b"\0"),
    ]  # fmt: skip


def test_the_rules_that_a_master_needs_for_a_load() -> None:
    rules = parse_rules(domain_rules(1000))
    assert list(rules) == [DOMAIN, CONTROL_DOMAIN]
    assert rules[DOMAIN].rounded_ms == (1, 1000)
    assert rules[CONTROL_DOMAIN].burst == (0, 0)


def test_names_of_tubes() -> None:
    plan = Plan(protocol="beanstalk", work=Work.read("cycle"))
    assert names_of(plan, 0x1234ABC) == {"use": b"counterbench-1234abc-", "watch": b"counterbench-1234abc-", "": b""}
