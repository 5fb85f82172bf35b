"""The redis dialect: requests byte for byte."""

from __future__ import annotations

from counterd.bench.dialects.redis import requests_of, resp
from counterd.bench.plan import Plan


def test_a_resp_request() -> None:
    assert resp(b"GET", b"jobs") == b"*2\r\n$3\r\nGET\r\n$4\r\njobs\r\n"


def test_requests_byte_for_byte() -> None:
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
