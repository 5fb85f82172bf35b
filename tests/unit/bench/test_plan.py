"""The options of counterbench: how they are read, and which cannot be combined."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from counterd.bench.dialects import DIALECTS, OPS
from counterd.bench.options import Hold, Keys, Work
from counterd.bench.plan import Plan, connections_of, read_work
from counterd.bench.takes import Items, Take
from counterd.cli.bench import main

if TYPE_CHECKING:
    from collections.abc import Callable


WRONG: list[tuple[Callable[[str], object], str]] = [
    *((Keys.read, text) for text in ("", "zipf", "zipf:", "zipf:0", "zipf:11", "zipf:-1", "normal", "uniform:1")),
    *((Hold.read, text) for text in ("", "fixed", "fixed:", "exp:", "10ms", "normal:1s", "fixed:-1s", "exp:x")),
    *((read_work, text) for text in ("", "mix", "mix:", "mix:get", "mix:get=", "mix:get=-1", "mix:get=0", "use",
                                     "mix:get=1,get=2", "mix:use=1", "mix:get=1,", "get=1", "mix:get=1234567")),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text"), WRONG)
def test_invalid_values_are_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^(expected|each of) "):
        read(text)


def test_valid_values_are_read() -> None:
    assert (Keys.read("uniform"), Keys.read("seq")) == (Keys(), Keys("seq"))
    assert Keys.read("zipf:1.03") == Keys("zipf", 1.03)
    assert Hold.read("fixed:10ms") == Hold("fixed", 0.01)
    assert Hold.read("exp:0") == Hold("exp", 0.0)
    assert read_work("acquire-release") == Work()
    assert [read_work(op).weights for op in OPS] == [{op: 1} for op in OPS]
    assert read_work("mix:get=3,acquire=0").weights == {"get": 3, "acquire": 0}


MESSAGES: dict[str, Any] = {"protocol": "smockron", "work": read_work("account")}
RATES: dict[str, Any] = {"take": Take(items=Items(0, 1))}
JOBS: dict[str, Any] = {"protocol": "beanstalk", "work": read_work("cycle")}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"requests": None, "duration": None}, "use --requests"),
    ({"requests": -1}, "must not be negative"),
    ({"connections": 2, "processes": 3}, "3 threads need at least as many"),
    ({"connections": 0, "processes": 0}, "at least one connection"),
    ({"processes": 0}, "at least one connection"),
    ({"depth": 0}, "1 to 1048576 requests in flight, not 0"),
    ({"depth": 1 << 21}, "1 to 1048576 requests in flight"),
    ({"duration": -1.0}, "a time must be"),
    ({"duration": float("nan")}, "a time must be"),
    ({"warmup": 1e9}, "a time must be"),
    ({"hold": Hold("exp", 1e9)}, "a time must be"),
    ({"rate": 0.0}, "a rate must be"),
    ({"rate": float("inf")}, "a rate must be"),
    ({"rate": -1.0}, "a rate must be"),
    ({"churn": -1.0}, "a rate must be"),
    ({"churn": 1e10}, "a rate must be"),
    ({"names": 0}, "1 to 1073741824 names, not 0"),
    ({"names": (1 << 30) + 1}, "1 to 1073741824 names"),
    ({"names": 17, "name_size": 1}, "only 16 names of 1 bytes, not 17"),
    ({"name_size": 0}, "a name must have 1 to 65535"),
    ({"name_size": 65536}, "a name must have 1 to 65535"),
    ({"name_size": 251, "protocol": "memcached"}, "a name must have 1 to 250 bytes in the memcached"),
    ({"resources": 0}, "resources must be 1 to"),
    ({"resources": 5, "maximum": 4}, "asks for 5, and the maximum is 4: none would be granted"),
    ({"maximum": 1 << 32}, "the maximum must be at most 4294967295"),
    ({"hold": Hold("fixed", 1.0), "work": read_work("get")}, "--hold can only be used with acquire-release"),
    ({"keep_alive": False, "depth": 2}, "--pipeline cannot be used"),
    ({"keep_alive": False, "rate": 5.0}, "--rate cannot be used"),
    ({"keep_alive": False, "churn": 1.0}, "need --keep-alive 1"),
    ({"keep_alive": False, "hold": Hold("fixed", 1.0)}, "--hold and --churn need --keep-alive 1"),
    ({"protocol": "redis", "verify": True}, "which redis does not have"),
    ({"protocol": "memcached", "churn": 1.0}, "which memcached does not have"),
    ({"protocol": "throttr"}, "the throttr protocol has noop, get, .*, not acquire, release"),
    ({"protocol": "counter", "work": read_work("set")}, "has noop, get, acquire, release, not set"),
    ({"protocol": "throttr", "work": read_work("query"), "name_size": 256}, "a name must have 1 to 255"),
    ({"protocol": "throttr", "work": read_work("set"), "value_size": 65536}, "a buffer must have 0 to 65535 bytes"),
    ({"protocol": "throttr", "work": read_work("set"), "value_size": 256, "number_type": "uint8"}, "0 to 255 bytes"),
    ({"protocol": "throttr", "work": read_work("insert"), "ttl": 0.256, "number_type": "uint8"}, "a TTL of 0.256 s"),
    ({"protocol": "throttr", "work": read_work("insert"), "ttl": 0.0}, "a TTL of 0 s"),
    ({"protocol": "redis", "work": read_work("insert"), "ttl": 0.0015}, "redis counts a TTL in milliseconds"),
    ({"protocol": "redis", "work": read_work("set"), "value_size": 1 << 20}, "a buffer must have 0 to 524288 bytes"),
    (
        {"protocol": "throttr", "work": read_work("mix:set=1,query=1"), "name_size": 8},
        "names of 8 bytes contain only a number",
    ),
    ({"protocol": "redis", "work": read_work("mix:insert=1,update=1"), "name_size": 2}, "names of 2 bytes contain"),
    ({"protocol": "sentinel", "churn": 1.0}, "--churn reads how many permits are held"),
    ({"protocol": "sentinel", "names": 8193}, "at most 8192 flows of a kind, not 8193"),
    ({"protocol": "sentinel", "resources": 1 << 31, "maximum": 1 << 31}, "resources must be 1 to 2147483647 in"),
    ({"protocol": "sentinel", "verify": True, "maximum": (1 << 31) - 1}, "must be less than 2147483647"),
    ({"protocol": "sentinel", "verify": True, "work": read_work("flow")}, "must contain acquire"),
    ({"protocol": "sentinel", "work": read_work("get")}, "noop, acquire, release, flow, param, keep, not get"),
    ({"protocol": "sentinel", "work": read_work("param"), "name_size": 997}, "a name must have 1 to 996 bytes"),
    ({"protocol": "redis-lua", "work": read_work("keep")}, "noop, acquire, release, flow, counts, not keep"),
    ({"protocol": "redis-lua", "verify": True}, "which redis-lua does not have"),
    ({"protocol": "redis", "work": read_work("flow")}, "the redis protocol has .*, not flow"),
    ({"protocol": "beanstalk"}, "the beanstalk protocol has noop, put, cycle, fan, not acquire, release"),
    ({"protocol": "redis", "work": read_work("put")}, "the redis protocol has .*, not put"),
    ({**JOBS, "names": 2}, "jobs have no names"),
    ({**JOBS, "name_size": 8}, "jobs have no names"),
    ({**JOBS, "keys": Keys("seq")}, "jobs have no names"),
    ({**JOBS, "keep_alive": False}, "jobs belong to connections that stay"),
    ({**JOBS, "churn": 1.0}, "--churn reads how many permits are held, which beanstalk does not report"),
    ({**JOBS, "hold": Hold("fixed", 1.0)}, "--hold can only be used with acquire-release"),
    ({**JOBS, "delay": -1}, "a delay must be 0 to 1e\\+07 seconds"),
    ({**JOBS, "delay": 10**8}, "a delay must be 0 to 1e\\+07 seconds"),
    ({"delay": 1}, "--delay is for jobs"),
    ({"take": Take(), "protocol": "sentinel"}, "the sentinel protocol has no Take"),
    ({"take": Take(wait=1.0), "protocol": "redis-lua"}, "redis-lua has no queue"),
    ({"take": Take(weights=(1, 2)), "protocol": "redis-lua"}, "redis-lua has no queue"),
    ({"take": Take(), "work": read_work("get")}, "no acquire that could be a Take"),
    ({**RATES}, "rates are not released: use -t acquire"),
    ({**RATES, "work": read_work("acquire"), "verify": True}, "rates are not released"),
    ({"take": Take(limit=2)}, "--limit is for rates"),
    ({"take": Take(burst=2)}, "--burst is for rates"),
    (
        {"take": Take(items=Items(1, 1), limit=(1 << 22) + 1), "protocol": "redis-lua"},
        "with redis-lua the limit of a rate must be 1 to 4194304",
    ),
    ({"take": Take(wait=1.0), "keep_alive": False}, "--wait needs --keep-alive 1"),
    ({"take": Take(weights=(0,))}, "a weight must be"),
    ({"take": Take(wait=0.0005)}, "whole milliseconds, at least one"),
    ({"take": Take(items=Items(2, 0)), "name_size": 33_000}, "at most 65175 bytes together, not 66002"),
    ({**JOBS, "value_size": 7, "verify": True}, "must have 8 bytes"),
    ({**JOBS, "value_size": 1 << 20}, "a buffer must have 0 to 524288 bytes"),
    ({**JOBS, "work": read_work("fan"), "value_size": 23}, "must have 24 bytes"),
    ({**JOBS, "work": read_work("mix:fan=1,put=1")}, "a fan cannot be part of a mix"),
    ({**JOBS, "work": read_work("fan"), "producers": 50}, "of 50 connections, 50 cannot be producers"),
    ({**JOBS, "work": read_work("fan"), "processes": 2}, "one producer for each of 2 threads"),
    ({**JOBS, "work": read_work("put"), "verify": True}, "put does not delete its jobs: use --requests"),
    ({**JOBS, "work": read_work("put"), "verify": True, "requests": 1 << 25}, "at most 16777216 jobs"),
    ({"protocol": "smockron"}, "the smockron protocol has noop, account, control, not acquire, release"),
    ({**MESSAGES, "keep_alive": False}, "gatekeepers stay connected"),
    ({**MESSAGES, "verify": True}, "which smockron does not have"),
    ({**MESSAGES, "churn": 1.0}, "which smockron does not have"),
    ({**MESSAGES, "name_size": 256}, "a name must have 1 to 255 bytes"),
    ({**MESSAGES, "work": read_work("mix:control=1,account=1")}, "control cannot be part of a mix"),
    ({**MESSAGES, "work": read_work("control"), "socket": "/s"}, "control needs two ports"),
    ({**MESSAGES, "work": read_work("control"), "name_size": 7}, "identifiers need 8 bytes"),
    ({**MESSAGES, "work": read_work("control"), "port": 65535}, "no port after 65535: use --control-port"),
    ({"work": read_work("account")}, "the counter protocol has .*, not account"),
    ({"verify": True, "names": 1 << 25}, "--verify can count at most 16777216 names"),
    ({"tls": True, "socket": "/s"}, "a Unix socket cannot use TLS"),
    ({"cacert": "/ca"}, "--cacert, --cert and --key need --tls"),
    ({"tls": True, "key": "/k"}, "--key needs --cert"),
]


@pytest.mark.parametrize(("options", "text"), MISTAKES, ids=str)
def test_impossible_combinations_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Plan(**options)


@pytest.mark.parametrize(
    "options",
    [{}, {"take": Take(wait=1.0, items=Items(2, 2), weights=(1, 2)), "hold": Hold("exp", 0.1), "verify": True},
     {**RATES, "work": read_work("acquire")}, {"protocol": "redis-lua", "take": Take(items=Items(2, 2))},
     {"requests": 0, "duration": None}, {"duration": 0.0}, {"connections": 3, "processes": 3}, {"rate": 0.1},
     {"names": 16, "name_size": 1}, {"names": 1 << 30, "name_size": 8}, {"resources": 4, "maximum": 4},
     {"protocol": "throttr", "work": read_work("mix:set=1,get=1,noop=1"), "name_size": 8},
     {"protocol": "sentinel", "verify": True, "hold": Hold("exp", 0.1)}, {"protocol": "sentinel", "names": 8192},
     {"protocol": "sentinel", "names": 100_000, "work": read_work("param"), "name_size": 996},
     {"protocol": "sentinel", "work": read_work("mix:acquire=1,keep=1,flow=1,param=1"), "name_size": 8}],
    ids=str,
)  # fmt: skip
def test_possible_combinations(options: dict[str, Any]) -> None:
    Plan(**options)


def test_default_ports_and_prefill() -> None:
    assert [Plan(protocol=name).port for name in ("counter", "redis", "memcached")] == [11215, 6379, 11211]
    assert Plan(port=5).port == 5
    assert [Plan(protocol=name).prefill for name in ("counter", "redis", "memcached")] == [False, False, True]


def test_which_loads_get_buffers() -> None:
    get, both = read_work("get"), read_work("mix:get=1,set=1")
    numbers = [Plan(work=get), Plan(protocol="redis", work=get)]
    buffers = [
        Plan(protocol="redis", work=get, value_size=5), Plan(protocol="redis", work=both),
        Plan(protocol="throttr", work=get),
    ]  # fmt: skip
    assert [plan.asks("count") for plan in numbers + buffers] == [True] * 2 + [False] * 3
    assert [plan.fills() for plan in buffers] == [("set",)] * 3


def test_dialects_without_prefill() -> None:
    assert [name for name, dialect in DIALECTS.items() if not dialect.fills] == [
        "sentinel", "beanstalk", "smockron", "redis-lua",
    ]  # fmt: skip


def test_the_control_port_is_the_next_port_by_default() -> None:
    control = {**MESSAGES, "work": read_work("control")}
    assert [Plan(**control, **more).control_port for more in ({}, {"port": 7}, {"control_port": 9})] == [10005, 8, 9]
    assert Plan(**control).as_options()["control-port"] == 10005
    assert "control-port" not in Plan(**MESSAGES).as_options()


def test_which_loads_hold_permits_and_wait() -> None:
    rates = Plan(**RATES, work=read_work("acquire"))
    assert [plan.fills() for plan in (Plan(take=Take()), rates)] == [("acquire", "release"), ()]
    assert [plan.holds_permits() for plan in (Plan(), Plan(take=Take()), rates)] == [True, True, False]
    assert [plan.waits() for plan in (Plan(), Plan(take=Take()), Plan(take=Take(wait=0.1)))] == [False, False, True]
    plans = [Plan(), Plan(take=Take()), Plan(protocol="sentinel"), Plan(protocol="redis-lua", take=Take())]
    assert [plan.has_unique_tokens() for plan in plans] == [False, True, True, False]


def test_which_loads_need_names_that_exist() -> None:
    needing = {op for op in DIALECTS["throttr"].ops if Plan(protocol="throttr", work=read_work(op)).needs_names()}
    assert needing == {"get", "query", "update"}
    assert not Plan(protocol="redis", work=read_work("get")).needs_names()
    assert not Plan(protocol="throttr", work=read_work("mix:query=0,set=1")).needs_names()


def test_the_default_work_and_number_of_connections() -> None:
    assert [dialect.work for dialect in DIALECTS.values()] == [
        "acquire-release", "update", "acquire-release", "cycle", "account", *["acquire-release"] * 3,
    ]  # fmt: skip
    assert (connections_of(Work(), 3), connections_of(read_work("fan"), 3)) == (50, 503)


def test_options_go_into_a_file() -> None:
    options = Plan(work=read_work("mix:get=1"), hold=None, keys=Keys("zipf", 1.5)).as_options()
    assert json.loads(json.dumps(options)) == options
    assert options["ops"] == "mix:get=1"
    assert options["keys"] == "zipf:1.5"


@pytest.mark.parametrize(
    ("plan", "told", "left_out"),
    [
        (
            Plan(),
            {"duration": "10s", "pipeline": 1, "maximum": 1_000_000},
            {"ttl", "rate", "hold", "number-type", "tls"},
        ),
        (
            Plan(hold=Hold("exp", 0.05), rate=500.0),
            {"hold": "exp:50ms", "rate": 500.0, "arrivals": "constant"},
            {"churn"},
        ),
        (
            Plan(socket="/run/x", depth=8, warmup=0.00025),
            {"socket": "/run/x", "pipeline": 8, "warmup": "250us"},
            {"host"},
        ),
        (
            Plan(protocol="throttr", work=read_work("insert")),
            {"ttl": "100ms", "number-type": "uint16", "port": 9000},
            {"maximum", "resources", "value-size"},
        ),
        (
            Plan(protocol="beanstalk", work=read_work("fan"), delay=2),
            {"ops": "fan", "value-size": 100, "producers": 1, "delay": "2s", "port": 11300},
            {"names", "keys", "name-size", "maximum", "resources"},
        ),
        (
            Plan(take=Take(wait=0.5, items=Items(2, 1), weights=(1, 2))),
            {"wait": "500ms", "items": "permits=2,rates=1", "limit": 1_000_000, "burst": 1_000_000, "weights": "1,2"},
            {"priorities"},
        ),
        (Plan(take=Take(priorities=(0, 1))), {"items": "permits=1", "priorities": "0,1"}, {"wait", "limit", "burst"}),
        (Plan(**JOBS), {"ops": "cycle", "value-size": 100}, {"producers", "delay", "names"}),
    ],
)
def test_options_are_those_of_the_command_line(plan: Plan, told: dict[str, Any], left_out: set[str]) -> None:
    """With the same names and the same notation; only those that this load uses."""
    options = plan.as_options()
    assert told.items() <= options.items()
    assert not left_out & options.keys()
    names = {option.lstrip("-") for each in main.params for option in each.opts}
    assert options.keys() <= names
