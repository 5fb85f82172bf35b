"""Requests, as bytes; what is in the requests that are sent is in tests/functional/test_counterbench.py."""

from __future__ import annotations

import pytest

from counterd.bench.plan import Plan
from counterd.bench.words import requests_of


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
        "fill": b"*3\r\n$3\r\nSET\r\n$4\r\njobs\r\n$1\r\n0\r\n",
    }
    many = requests_of(Plan(protocol="redis", resources=12), b"jobs")
    assert many["acquire"] == b"*3\r\n$6\r\nINCRBY\r\n$4\r\njobs\r\n$2\r\n12\r\n"
    assert many["release"] == b"*3\r\n$6\r\nDECRBY\r\n$4\r\njobs\r\n$2\r\n12\r\n"


def test_memcached() -> None:
    assert requests_of(Plan(protocol="memcached", resources=12), b"jobs") == {
        "noop": b"mn\r\n",
        "get": b"get jobs\r\n",
        "acquire": b"incr jobs 12\r\n",
        "release": b"decr jobs 12\r\n",
        "fill": b"set jobs 0 0 1\r\n0\r\n",
    }


@pytest.mark.parametrize("protocol", ["counter", "redis", "memcached"])
def test_requests_of_one_kind_differ_in_their_name_alone(protocol: str) -> None:
    """Which is what a load process builds on."""
    plan = Plan(protocol=protocol, resources=7)
    for first, second in zip(requests_of(plan, b"aaaa").values(), requests_of(plan, b"bbbb").values(), strict=True):
        assert first.replace(b"aaaa", b"bbbb") == second
        assert first.count(b"aaaa") <= 1
