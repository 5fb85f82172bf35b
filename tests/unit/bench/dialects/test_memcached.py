"""The memcached dialect: requests byte for byte."""

from __future__ import annotations

from counterd.bench.dialects.memcached import requests_of
from counterd.bench.plan import Plan


def test_requests_byte_for_byte() -> None:
    assert requests_of(Plan(protocol="memcached", resources=12), b"jobs") == {
        "noop": b"mn\r\n",
        "get": b"get jobs\r\n",
        "acquire": b"incr jobs 12\r\n",
        "release": b"decr jobs 12\r\n",
        "fill": b"set jobs 0 0 1\r\n0\r\n",
    }
