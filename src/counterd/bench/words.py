"""What a load process asks, as bytes, in each of the protocols that it speaks.

A side, pure Python. What the answers mean is in _words.pxd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.bench.domains import CONTROL_DOMAIN, DOMAIN
from counterd.bench.flows import FIRST_RATE, FIRST_SEMAPHORE, NAMESPACE, PARAM_FLOW
from counterd.bench.plan import ttl_of
from counterd.bench.scripts import LEASE_MS, WINDOW_MS, digest, resp
from counterd.protocols.beanstalk import wire as beanstalk
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel
from counterd.protocols.smockron import wire as smockron
from counterd.protocols.smockron.wire import SocketType, Status
from counterd.protocols.throttr.wire import Attribute, Change, Encoder, TTLType, ValueSize

if TYPE_CHECKING:
    from counterd.bench.plan import Plan

LASTING = 100  # hours that what a load needs is there for
VALUE = b"v"  # what buffers are full of: no digit of a name is in it
TOKEN = b"t" * 16  # stands for a token where that is written in hexadecimal
TTR = 3600  # seconds: longer than any load has a job
MOMENT = b"9" * 13  # stands for a time in milliseconds
GIVE_UP_S = 5  # that a reserve of a cycle waits for a job that is due, which is there unless its put was refused


def requests_of(plan: Plan, name: bytes) -> dict[str, bytes]:
    """Each kind of request for that name; "fill" makes it exist, where acquire and release do not."""
    of = {
        "throttr": _throttr, "sentinel": _sentinel, "redis-lua": _scripts, "beanstalk": _jobs, "smockron": _messages,
    }.get(plan.protocol)  # fmt: skip
    if of is not None:
        return of(plan, name)
    amount = str(plan.resources).encode()
    if plan.protocol == "counter":
        return {
            "noop": wire.noop(0),
            "get": wire.get(0, name),
            "acquire": wire.acquire(0, name, plan.resources, plan.maximum),
            "release": wire.release(0, name, plan.resources),
        }
    if plan.protocol == "redis":
        one = plan.resources == 1
        return {
            "noop": resp(b"PING"),
            "get": resp(b"GET", name),
            "acquire": resp(b"INCR", name) if one else resp(b"INCRBY", name, amount),
            "release": resp(b"DECR", name) if one else resp(b"DECRBY", name, amount),
            "query": resp(b"GET", name),
            "update": resp(b"INCRBY", name, b"1"),
            "lower": resp(b"DECRBY", name, b"1"),
            "insert": resp(b"SET", name, b"0", b"PX", b"%d" % max(1, round(plan.ttl * 1e3))),
            "purge": resp(b"DEL", name),
            "set": resp(b"SET", name, VALUE * plan.buffer_size),
            "fetch": resp(b"GET", name),
            "fill": resp(b"SET", name, b"0"),
        }
    return {
        "noop": b"mn\r\n",
        "get": b"get %b\r\n" % name,
        "acquire": b"incr %b %b\r\n" % (name, amount),
        "release": b"decr %b %b\r\n" % (name, amount),
        "fill": b"set %b 0 0 1\r\n0\r\n" % name,
    }


def names_of(plan: Plan, run: int) -> dict[str, bytes]:
    """The name in each kind of request but for its last digits: of numbers, of buffers, and of what is new each time.

    run: its low 28 bits keep the names that one run inserts or is told of, and its tubes, from those of others.
    """
    if plan.protocol == "beanstalk":
        tube = b"counterbench-%07x-" % (run & 0xFFFFFFF)
        return {"use": tube, "watch": tube, "": b""}
    size = plan.name_size - min(plan.name_size, 8)
    fresh = (b"i" + (b"%07x" % (run & 0xFFFFFFF))[::-1] + b"i" * size)[:size]
    if plan.protocol == "smockron":
        return {"control": fresh, "": b"n" * size}
    return {"insert": fresh, "purge": fresh, "set": b"b" * size, "fetch": b"b" * size, "": b"n" * size}


def _throttr(plan: Plan, name: bytes) -> dict[str, bytes]:
    encoder = Encoder(ValueSize.named(plan.number_type))
    ttl_type, ttl = ttl_of(plan)
    requests = {
        "noop": encoder.whoami(),
        "query": encoder.query(name),
        "update": encoder.update(name, Attribute.QUOTA, Change.INCREASE, 1),
        "lower": encoder.update(name, Attribute.QUOTA, Change.DECREASE, 1),
        "insert": encoder.insert(name, 0, ttl, ttl_type),
        "purge": encoder.purge(name),
        "set": encoder.set(name, VALUE * plan.buffer_size, LASTING, TTLType.HOURS),
        "fetch": encoder.get(name),
        "fill": encoder.insert(name, 0, LASTING, TTLType.HOURS),
        "clear": encoder.purge(name),
    }
    return {kind: bytes(request) for kind, request in requests.items()}


def _sentinel(plan: Plan, name: bytes) -> dict[str, bytes]:
    """Flows and tokens are numbers: these have the first flow, and no token yet. Only values have names."""
    return {
        "noop": sentinel.ping(0, NAMESPACE.encode()),
        "acquire": sentinel.acquire(0, FIRST_SEMAPHORE, plan.resources),
        "release": sentinel.release(0, 0),
        "keep": sentinel.keep(0, 0),
        "flow": sentinel.flow(0, FIRST_RATE, plan.resources),
        "param": sentinel.param_flow(0, PARAM_FLOW, plan.resources, [name]),
    }


def _scripts(plan: Plan, name: bytes) -> dict[str, bytes]:
    """What each is limited by has a key of its own."""
    limit, lease, window = b"%d" % plan.maximum, b"%d" % LEASE_MS, b"%d" % WINDOW_MS
    held = b"held:" + name
    return {
        "noop": resp(b"PING"),
        "acquire": resp(b"EVALSHA", digest("acquire"), b"1", held, limit, lease, TOKEN),
        "release": resp(b"ZREM", held, TOKEN),
        "flow": resp(b"EVALSHA", digest("flow"), b"1", b"flow:" + name, limit, window),
        "counts": resp(b"EVALSHA", digest("counts"), b"1", b"counts:" + name, limit, window),
    }


def _jobs(plan: Plan, name: bytes) -> dict[str, bytes]:
    """The name is a tube's, or a job's number; in a fan the time when the job is put is behind it. A delete is open:
    the id of a job is yet to come.
    """
    body = name + (TOKEN if plan.fans() else b"") + VALUE * plan.buffer_size
    wait = None if plan.fans() else plan.delay + GIVE_UP_S
    return {
        "noop": beanstalk.list_tube_used(),
        "put": beanstalk.put(body[: plan.buffer_size], delay=plan.delay, ttr=TTR),
        "reserve": beanstalk.reserve(wait),
        "delete": b"delete ",
        "use": b"use %b\r\n" % name,
        "watch": b"watch %b\r\n" % name,
        "ignore": beanstalk.ignore(b"default"),
    }


def _messages(plan: Plan, name: bytes) -> dict[str, bytes]:
    """The name is an identifier. A time and, behind a batch, a PING are yet to come; noop is that PING alone."""
    moment = int(MOMENT)
    return {
        "noop": b"",
        "account": smockron.accounting(DOMAIN, Status.ACCEPTED, name, moment),
        "control": smockron.accounting(CONTROL_DOMAIN, Status.ACCEPTED, name, moment),
        "greet": smockron.greeting(),
        "join": smockron.ready(SocketType.PUB),
        "meet": smockron.ready(SocketType.SUB),
        "listen": smockron.subscribe(smockron.topic(CONTROL_DOMAIN)),
    }  # fmt: skip
