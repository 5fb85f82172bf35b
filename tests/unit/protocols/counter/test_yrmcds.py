"""Configuration files of yrmcds: they work unchanged, and each mistake has its exact message."""

from __future__ import annotations

import grp
import os
import pwd

import pytest

from counterd.control.config.keys import settings_for
from counterd.control.config.loading import load
from counterd.protocols.counter import PROTOCOL as COUNTER
from counterd.protocols.counter.yrmcds import KEYS

ON = "counter.enable = true\n"
OPEN = ", as yrmcds does, so everybody who can reach this machine can use it; set "
TLS_OR_ALLOW = "counter.tls.cert or counter.allow"

YRMCDS = f"""
# an instance of yrmcds with its counter protocol
user = {pwd.getpwuid(os.getuid()).pw_name}
group = {grp.getgrgid(os.getgid()).gr_name}
virtual_ip = 192.0.2.1
bind_ip = 192.0.2.7 192.0.2.1 2001:db8::7
port = 11211
repl_port = 11213
max_connections = 10000
temp_dir = "/var/tmp/yrmcds"
log.threshold = warning
log.file = "/var/log/yrmcds.log"
buckets = 1000000
max_data_size = 10M
heap_data_limit = 256K
repl_buffer_size = 30
initial_repl_sleep_delay_usec = 0
secure_erase = false
lock_memory = false
memory_limit = 1024M
workers = 10
gc_interval = 10
slave_timeout = 10

counter.enable = true
counter.port = 11216
counter.max_connections = 7
counter.buckets = 20000
counter.stat_interval = 3600
"""


def test_a_file_of_yrmcds_works_unchanged(write):
    found = load(write(YRMCDS), [], [COUNTER])
    assert found.values == {key: setting.default for key, setting in settings_for([COUNTER]).items()} | {
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "group": grp.getgrgid(os.getgid()).gr_name,
        "log.level": "warning",
        "counter.enable": True,
        "counter.bind": ("192.0.2.1", "192.0.2.7", "2001:db8::7"),
        "counter.insecure": True,
        "counter.port": 11216,
        "counter.max_connections": 7,
        "counter.buckets": 20000,
        "counter.stats_interval": 3600,
    }
    assert (found.origins["log.level"], found.origins["counter.bind"]) == ("F:11", "F:6")
    assert found.origins.keys() == found.values.keys()
    assert found.warnings == (
        "F is a configuration file of yrmcds; counterd ignores these keys in it: port, repl_port, max_connections,"
        " temp_dir, log.file, buckets, max_data_size, heap_data_limit, repl_buffer_size, initial_repl_sleep_delay_usec,"
        " secure_erase, lock_memory, memory_limit, workers, gc_interval, slave_timeout",
        "F: counter listens on 192.0.2.1 192.0.2.7 2001:db8::7" + OPEN + TLS_OR_ALLOW,
    )


@pytest.mark.parametrize("key", [name for name, meaning in KEYS.items() if meaning is None])
def test_memcache_keys_mark_a_file_of_yrmcds_and_are_ignored(write, key):
    found = load(write(f"{ON}counter.bind = ::1\n{key} = x\n{key} = y"), [], [COUNTER])
    assert found.warnings == (f"F is a configuration file of yrmcds; counterd ignores these keys in it: {key}",)
    assert key not in found.values


EVERYWHERE_WARNING = (
    "F: counter listens on ALL addresses (0.0.0.0 ::)" + OPEN + "counter.bind or bind_ip, " + TLS_OR_ALLOW
)


def open_on(addresses: str) -> str:
    return f"F: counter listens on {addresses}{OPEN}{TLS_OR_ALLOW}"


VIRTUAL_ONLY_WARNING = (
    "F: bind_ip is not set: counter listens only on virtual_ip (192.0.2.1), but yrmcds listens on all addresses"
)


@pytest.mark.parametrize(
    ("lines", "bind", "origin", "warnings"),
    [
        ("virtual_ip = 192.0.2.1", ("192.0.2.1",), "F:2", (VIRTUAL_ONLY_WARNING, open_on("192.0.2.1"))),
        ("bind_ip = 192.0.2.7", ("192.0.2.7",), "F:2", (open_on("192.0.2.7"),)),
        ("bind_ip = 127.0.0.2 ::1", ("127.0.0.2", "::1"), "F:2", ()),
        ("bind_ip = 192.0.2.7\ncounter.allow = 192.0.2.0/24", ("192.0.2.7",), "F:2", ()),
        ("bind_ip = 192.0.2.7\ncounter.insecure = true", ("192.0.2.7",), "F:2", ()),
        (
            "bind_ip = 192.0.2.7\nvirtual_ip = 192.0.2.1",
            ("192.0.2.1", "192.0.2.7"),
            "F:2",
            (open_on("192.0.2.1 192.0.2.7"),),
        ),
        ("bind_ip = 192.0.2.7\ncounter.bind = ::1", ("::1",), "F:3", ()),
        ("log.threshold = info", ("0.0.0.0", "::"), "default", (EVERYWHERE_WARNING,)),
        ("bind_ip =", ("0.0.0.0", "::"), "F:2", (EVERYWHERE_WARNING,)),
    ],
)
def test_the_addresses_of_yrmcds(write, lines, bind, origin, warnings):
    found = load(write(ON + lines), [], [COUNTER])
    assert (found.values["counter.bind"], found.origins["counter.bind"]) == (bind, origin)
    assert found.warnings == warnings


def test_overrides_of_a_file_of_yrmcds(write):
    found = load(write(YRMCDS), ["log.level=debug", "counter.bind=::1", "port=1"], [COUNTER])
    assert (found.values["log.level"], found.values["counter.bind"]) == ("debug", ("::1",))
    found = load(write(YRMCDS), ["log.threshold=error", "bind_ip=::1", "virtual_ip="], [COUNTER])
    assert (found.values["log.level"], found.values["counter.bind"]) == ("error", ("::1",))
    assert found.origins["counter.bind"] == "--set"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("bind_ip = 192.0.2.7 here", "F:2: bind_ip: expected IP addresses, not 'here'"),
        ("virtual_ip = 192.0.2.256", "F:2: virtual_ip: expected IP addresses, not '192.0.2.256'"),
        ("bind_ip = ::1\nbind_ip = ::1", "F:3: bind_ip is set twice, first in F:2"),
        ("log.threshold = loud", "F:2: log.threshold: expected one of error, warning, info, debug, not 'loud'"),
        ("log.level = info\nlog.threshold = info", "F:3: log.threshold is set twice, first as log.level in F:2"),
        ("port = 1\nlog.treshold = info", "F:3: unknown key 'log.treshold', did you mean log.threshold?"),
    ],
)
def test_a_mistake_in_a_file_of_yrmcds(problems, lines, message):
    assert problems(ON + lines) == [message]


def test_insecure_false_in_a_file_of_yrmcds_is_obeyed(problems):
    (mistake,) = problems(ON + "bind_ip = 192.0.2.1\ncounter.insecure = false")
    assert mistake.startswith("F:2: counter.bind: 192.0.2.1 can be reached from other machines")


def test_a_file_of_yrmcds_may_contain_listener_keys(write):
    found = load(write(ON + "workers = 8\nlistener.bind = ::1"), [], [COUNTER])
    assert found.values["counter.bind"] == ("::1",)
