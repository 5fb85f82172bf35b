"""Keys of listeners, given for one protocol or for all; and the objects that a configuration consists of."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from counterd.control.config.keys import (
    TLS,
    Drain,
    Log,
    RedisAddress,
    Servers,
    settings_for,
    shared_settings,
    split_redis,
    split_servers,
)
from counterd.control.config.loading import ConfigError, changed, load, merged
from counterd.protocols import find_protocols
from counterd.protocols.counter import PROTOCOL as COUNTER
from counterd.protocols.smockron import PROTOCOL as SMOCKRON
from counterd.settings import integer, setting


@dataclass(frozen=True)
class Gate:
    width: int = setting(integer(1, 9), 3, "people", reload=True)
    height: int = setting(integer(1, 9), 2)


# A second protocol, of which only its name and settings matter here.
GATE = replace(
    COUNTER,
    name="gate",
    default_port=7000,
    settings=Gate,
    aliases={},
)


# ---- listener.KEY ---------------------------------------------------------------------------------------------------

ON = "counter.enable = true\n"
BOTH_ON = "counter.enable = true\ngate.enable = true\n"


def test_the_listener_keys_are_those_of_each_protocol_except_unshareable_ones():
    one = {key.removeprefix("gate") for key in settings_for([GATE]) if key.startswith("gate.")}
    shared = {key.removeprefix("listener") for key in shared_settings()}
    assert one - shared == {".enable", ".port", ".socket", ".width", ".height"}
    assert shared < one
    for key, one in shared_settings().items():
        own = settings_for([GATE])[f"gate{key.removeprefix('listener')}"]
        assert replace(own, key=key) == one


@pytest.mark.parametrize("own_first", [True, False])
def test_a_listener_key_is_the_default_of_each_protocol(write, own_first):
    lines = ["gate.idle_timeout = 7\n", "listener.idle_timeout = 5\n"]
    found = load(write(BOTH_ON + "".join(lines if own_first else lines[::-1])), [], [COUNTER, GATE])
    line = {True: (4, 3), False: (3, 4)}[own_first]
    assert (found.values["counter.idle_timeout"], found.values["gate.idle_timeout"]) == (5, 7)
    assert (found.origins["counter.idle_timeout"], found.origins["gate.idle_timeout"]) == tuple(f"F:{n}" for n in line)
    assert found.name("counter.idle_timeout") == "listener.idle_timeout"
    assert found.place("counter.idle_timeout") == f"F:{line[0]}: listener.idle_timeout"
    assert found.place("gate.idle_timeout") == f"F:{line[1]}: gate.idle_timeout"
    assert found.values.keys() == found.origins.keys() == settings_for([COUNTER, GATE]).keys()


def test_a_protocols_own_key_overrides_the_listener_key_in_any_order(write):
    path = write(BOTH_ON + "gate.idle_timeout = 7\nlistener.max_connections = 1")
    found = load(
        path, ["listener.idle_timeout=5", "listener.max_connections=2", "gate.max_connections=3"], [COUNTER, GATE]
    )
    assert (found.listener("counter").idle_timeout, found.listener("gate").idle_timeout) == (5, 7)
    assert (found.listener("counter").max_connections, found.listener("gate").max_connections) == (2, 3)
    assert found.place("counter.idle_timeout") == "--set: listener.idle_timeout"


def test_a_room_can_reset_a_listener_key_to_empty(write):
    found = load(write(BOTH_ON + "listener.tls.cert = /cert\ngate.tls.cert =\n"), [], [COUNTER, GATE])
    assert (found.listener("counter").tls.cert, found.listener("gate").tls.cert) == ("/cert", "")


SHARED_MISTAKES = [
    ("listener.idle_timeout = soon", ["F:3: listener.idle_timeout: expected a whole number of seconds, not 'soon'"]),
    ("listener.bnid = ::1", ["F:3: unknown key 'listener.bnid', did you mean listener.bind?"]),
    (
        "listener.port = 1",
        ["F:3: unknown key 'listener.port', because each protocol has its own: set counter.port or gate.port"],
    ),
    (
        "listener.enable = true",
        ["F:3: unknown key 'listener.enable', because each protocol has its own: set counter.enable or gate.enable"],
    ),
    (
        "listener.bind = ::1\nlistener.bind = ::1",
        ["F:4: listener.bind is set twice, first in F:3"],
    ),
    (
        "listener.bind = 192.0.2.1",
        [
            "F:3: listener.bind: 192.0.2.1 can be reached from other machines by everybody: set listener.tls.cert, or"
            " listener.allow, or listener.insecure = true if that is intended"
        ],
    ),
    (
        "listener.bind = 192.0.2.1\ngate.allow = 192.0.2.0/24",
        [
            "F:3: listener.bind: 192.0.2.1 can be reached from other machines by everybody: set listener.tls.cert, or"
            " listener.allow, or listener.insecure = true if that is intended"
        ],
    ),
    ("listener.tls.key = /key", ["F:3: listener.tls.key needs listener.tls.cert"]),
    ("listener.tls.cert = /cert\ngate.tls.cert =\ngate.tls.key = /key", ["F:5: gate.tls.key needs gate.tls.cert"]),
    (
        "listener.bind =",
        [
            "F:3: counter is enabled but listens nowhere: listener.bind and counter.socket are both empty",
            "F:3: gate is enabled but listens nowhere: listener.bind and gate.socket are both empty",
        ],
    ),
]


@pytest.mark.parametrize(("lines", "messages"), SHARED_MISTAKES)
def test_a_mistake_in_a_listener_key_is_reported_once(problems, lines, messages):
    assert problems(BOTH_ON + lines, specs=(COUNTER, GATE)) == messages


def test_two_protocols_cannot_share_an_address_and_port(problems, write):
    lines = "counter.port = 9\ngate.port = 9\nlistener.bind = 127.0.0.1, ::1\n"
    assert problems(BOTH_ON + lines, specs=(COUNTER, GATE)) == [
        "F:4: gate.port: 127.0.0.1:9 is already used by counter.port",
        "F:4: gate.port: [::1]:9 is already used by counter.port",
    ]
    for fine in (lines + "gate.bind = 127.0.0.2\n", lines.replace("9", "0")):
        load(write(BOTH_ON + fine), [], [COUNTER, GATE])


def test_an_allow_list_for_all_listeners_permits_reachable_addresses(write):
    load(write(BOTH_ON + "listener.bind = 192.0.2.1\nlistener.allow = 192.0.2.0/24"), [], [COUNTER, GATE])


def test_a_changed_listener_key_is_a_change_of_each_protocol_that_uses_it(write):
    old = load(write(BOTH_ON + "listener.idle_timeout = 5\nlistener.socket_mode = 600"), [], [COUNTER, GATE])
    new = load(
        write(BOTH_ON + "listener.idle_timeout = 6\nlistener.socket_mode = 660\ngate.idle_timeout = 5"),
        [],
        [COUNTER, GATE],
    )
    changeable, fixed = changed(old, new, settings_for([COUNTER, GATE]))
    assert changeable == ["counter.idle_timeout"]
    assert fixed == ["counter.socket_mode", "gate.socket_mode"]
    assert {new.place(key) for key in fixed} == {"F:4: listener.socket_mode"}
    both = merged(old, new, fixed, [COUNTER, GATE])
    assert both.listener("gate").socket_mode == 0o600
    assert both.place("gate.socket_mode") == "F:4: listener.socket_mode"
    assert (both.name("counter.idle_timeout"), both.name("gate.idle_timeout")) == (
        "listener.idle_timeout",
        "gate.idle_timeout",
    )


def test_keys_fixed_until_a_restart_are_named_as_in_the_new_file(write):
    old = load(write(BOTH_ON + "counter.bind = 192.0.2.1\ncounter.allow = 192.0.2.0/24"), [], [COUNTER, GATE])
    new = load(write(BOTH_ON + "listener.bind = ::1"), [], [COUNTER, GATE])
    with pytest.raises(ConfigError) as caught:
        merged(old, new, ["counter.bind", "gate.bind"], [COUNTER, GATE])
    assert caught.value.problems == (
        "F:3: listener.bind: 192.0.2.1 can be reached from other machines by everybody: set listener.tls.cert, or"
        " listener.allow, or listener.insecure = true if that is intended (these keys cannot change until a restart:"
        " listener.bind)",
    )


# ---- cluster.KEY ----------------------------------------------------------------------------------------------------

URL_EXPECTED = "expected redis://HOST:PORT,HOST:PORT or rediss://USER:PASSWORD@HOST:PORT,HOST:PORT"
CLUSTER_MISTAKES = [
    *(
        (f"cluster.url = {url}", [f"F:2: cluster.url: {URL_EXPECTED}"])
        for url in (
            "a:6379",
            "redis://",
            "unix:///path",
            "redis://a,",
            "redis://a:x",
            "redis://secret@a",
            "redis://a/1",
        )
    ),
    *(
        (f"cluster.url = redis://a,b:{port}", ["F:2: cluster.url: expected ports from 1 to 65535"])
        for port in (0, 65536)
    ),
    ("cluster.prefix = " + "ä" * 128, ["F:2: cluster.prefix: expected at most 255 bytes"]),
    ("cluster.lease = 0", ["F:2: cluster.lease: 0 is out of range, expected 1 to 3600"]),
    ("cluster.lease = 3601", ["F:2: cluster.lease: 3601 is out of range, expected 1 to 3600"]),
    ("cluster.on_loss = hope", ["F:2: cluster.on_loss: expected one of drop, keep, not 'hope'"]),
    ("cluster.unreachable = hope", ["F:2: cluster.unreachable: expected one of closed, share, open, not 'hope'"]),
    ("cluster.credentials = /f", ["F:2: cluster.credentials needs cluster.url"]),
    ("cluster.ca_file = /f", ["F:2: cluster.ca_file needs cluster.url"]),
    ("cluster.url = redis://a\ncluster.ca_file = /f", ["F:3: cluster.ca_file needs rediss:// in cluster.url"]),
    (
        "cluster.url = redis://:secret@a\ncluster.credentials = /f",
        ["F:3: cluster.credentials: cluster.url has a password too"],
    ),
]


@pytest.mark.parametrize(("lines", "messages"), CLUSTER_MISTAKES)
def test_mistakes_in_cluster_keys(problems, lines, messages):
    assert problems(ON + lines) == messages


def test_a_cluster_needs_a_protocol_that_shares_limits(problems):
    lines = "gate.enable = true\ncluster.url = redis://a\n"
    specs = (replace(COUNTER, leased_limits=COUNTER.make_store), replace(GATE, leased_limits=None))
    assert problems(lines, specs=specs) == ["F:2: cluster.url needs counter.enable = true"]


def test_a_cluster_without_its_packages(problems, monkeypatch):
    monkeypatch.setattr("counterd.control.config.loading.SHARED_NEEDS", "no_such_module")
    assert problems(ON + "cluster.url = redis://a") == [
        "F:2: cluster.url needs the extra redis: in the source tree, run pip install '.[redis]'"
    ]


def test_the_password_of_a_cluster_is_not_shown(problems):
    assert problems(ON, "cluster.url=redis://:secret@a:0") == [
        "--set cluster.url=...: cluster.url: expected ports from 1 to 65535"
    ]
    assert problems(ON + "cluster.url redis://:secret@a=\n") == ["F:2: expected key = value, not ..."]


@pytest.mark.parametrize(("url", "warns"), [("redis://:secret@a", True), ("redis://a", False)])
def test_a_cluster_url_with_a_password_in_a_readable_file_warns(write, url, warns):
    path = write(f"{ON}cluster.url = {url}\n")
    path.chmod(0o644)
    assert bool(load(path, [], [COUNTER]).warnings) == warns


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("redis://a", Servers([("a", 6379)], "", "", False)),
        ("rediss://a:1,b-1.example:2/", Servers([("a", 1), ("b-1.example", 2)], "", "", True)),
        ("redis://[::1],[::2]:7,10.0.0.1", Servers([("::1", 6379), ("::2", 7), ("10.0.0.1", 6379)], "", "", False)),
        ("redis://me:s%40%3A@a", Servers([("a", 6379)], "me", "s@:", False)),
        ("rediss://:secret@a:1", Servers([("a", 1)], "", "secret", True)),
    ],
)
def test_the_servers_of_a_cluster(write, url, servers):
    found = load(write(f"{ON}cluster.url = {url}\n"), [], [COUNTER]).process.cluster.url
    assert split_servers(found) == servers


# ---- the same, with types -------------------------------------------------------------------------------------------


def test_each_part_has_an_object(write):
    lines = "log.level = debug\ndrain.timeout = 3\nadmin.token = t\ncounter.tls.cert = /c\ncounter.tls.key = /k\n"
    found = load(write(ON + lines), [], [COUNTER, GATE])
    assert found.process.log == Log(level="debug", format="text")
    assert found.process.drain == Drain(mode="close", timeout=3)
    assert (found.process.user, found.process.tls.handshake_timeout) == ("", 5)
    assert (found.admin.token, found.admin.enable) == ("t", False)
    listener = found.listener("counter")
    assert (listener.enable, listener.port, listener.tls) == (True, 11215, TLS(cert="/c", key="/k"))
    assert found.own(GATE) == Gate(width=3, height=2)


PLAIN = RedisAddress("localhost", 6379, 0, "", "", False, "")
REDIS_URLS = [
    ("redis://a", PLAIN._replace(host="a")),
    ("redis://a:7/3", PLAIN._replace(host="a", port=7, database=3)),
    ("redis://a/", PLAIN._replace(host="a")),
    ("redis://a/3?db=4", PLAIN._replace(host="a", database=4)),
    ("redis:///3", PLAIN._replace(database=3)),
    ("redis://[::1]:7", PLAIN._replace(host="::1", port=7)),
    ("redis://:s%40e%2Fcret@a", PLAIN._replace(host="a", password="s@e/cret")),
    ("redis://me:secret@a", PLAIN._replace(host="a", user="me", password="secret")),
    ("redis://me@a", PLAIN._replace(host="a", user="me")),
    ("redis://a?username=me&password=s%20t", PLAIN._replace(host="a", user="me", password="s t")),
    ("rediss://a", PLAIN._replace(host="a", is_tls=True)),
    ("rediss://a?ssl_ca_certs=/c.pem", PLAIN._replace(host="a", is_tls=True, ca_file="/c.pem")),
    ("unix:///run/r?db=3", PLAIN._replace(host="/run/r", port=-1, database=3)),
    ("unix://me:secret@/run/%72?password=p", PLAIN._replace(host="/run/r", port=-1, user="me", password="p")),
]


@pytest.mark.parametrize(("url", "address"), REDIS_URLS)
def test_the_url_of_a_redis(url: str, address: RedisAddress) -> None:
    assert split_redis(url) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://:secret@a:port", "expected redis://"),
        ("redis://:secret@a:65536", "expected redis://"),
        ("redis://:secret@[a", "expected redis://"),
        ("redis://:sec#ret@a", "expected redis://"),
        ("redis://a?secret", "expected redis://"),
        ("unix://secret/a", "expected redis://"),
        ("unix://?db=1", "expected redis://"),
        ("redis://:secret@a/x", "expected the number of a database"),
        ("redis://:secret@a?db=-1", "expected the number of a database"),
        ("redis://a?ssl_cert_reqs=none&x=secret", "expected no options after ? but db,"),
        ("redis://:secret@a?ssl_ca_certs=/f", "ssl_ca_certs needs rediss://"),
        ("rediss://:secret@a?ssl_ca_certs=f", "expected an absolute path, not 'f'"),
        ("unix:///" + "a" * 108, "the path has 109 bytes"),
    ],
)
def test_a_mistake_in_the_url_of_a_redis(url: str, says: str) -> None:
    """The error does not show the password."""
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        split_redis(url)
    assert "secret" not in str(caught.value)


def test_mistakes_in_the_keys_of_smockron_state(problems):
    assert problems(
        "smockron.enable = true\nsmockron.rules = /f\nsmockron.state = redis://:secret@a/x\n", specs=(SMOCKRON,)
    ) == ["F:3: smockron.state: expected the number of a database, as in redis://HOST:PORT/0 or unix:///PATH?db=0"]


@pytest.mark.parametrize(
    ("lines", "warned"),
    [
        ("counter.port = 31215", "F:2: counter.port is set, but counter.enable = true is not: counter is off"),
        ("counter.enable = false\ncounter.port = 31215", ""),
        ("counter.port = 31215\ncounter.enable = true", ""),
        ("listener.idle_timeout = 9", ""),
        ("admin.bind = 127.0.0.1:1", "F:2: admin.bind is set, but admin.enable = true is not: admin is off"),
        ("admin.enable = true\nadmin.token = 15-characters..", "F:3: admin.token: one of less than 16 characters"),
        ("admin.enable = true\nadmin.token = 16-characters...", ""),
    ],
)
def test_settings_that_are_unused_or_weak_warn(write, lines, warned):
    path = write(f"smockron.enable = true\n{lines}\n")
    path.chmod(0o600)
    warnings = load(path, [], find_protocols()).warnings
    assert [warning.startswith(warned) for warning in warnings] == [True] * bool(warned), warnings
