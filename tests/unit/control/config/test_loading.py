"""The configuration: values and their origins, each mistake with its exact words, the shipped file."""

from __future__ import annotations

import grp
import os
import pwd
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.control.config import loading as config
from counterd.control.config.keys import settings_for, shared_settings, split_bind
from counterd.control.config.loading import Config, ConfigError, changed, find_file, load, merged
from counterd.protocols import find_protocols
from counterd.protocols.counter import PROTOCOL as COUNTER
from counterd.settings import integer, setting

ROOT = Path(__file__).parents[4]
SHIPPED = config.SHIPPED_FILE


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
    aliases={"gate.breadth": "gate.width"},
    foreign_file=None,
)
ON = "counter.enable = true\n"


# ---- settings -------------------------------------------------------------------------------------------------------


def test_every_protocol_has_the_settings_of_a_listener_and_its_own():
    keys = settings_for([GATE])
    listener = (
        "enable port bind insecure allow tls.cert tls.key tls.client_ca tls.require_client_cert socket socket_mode"
        " socket_user socket_group socket_allow max_connections max_connections_per_address max_requests_per_second"
        " idle_timeout keepalive_idle keepalive_interval keepalive_count user_timeout write_timeout"
    )
    assert list(keys) == [
        *("log.level", "log.format", "user", "group", "drain.mode", "drain.timeout", "tls.handshake_timeout"),
        *(f"cluster.{name}" for name in ["url", "credentials", "ca_file", "prefix", "lease", "on_loss", "unreachable"]),
        *(f"admin.{name}" for name in ("enable", "bind", "token", "allow", "insecure", "hosts")),
        *(f"gate.{name}" for name in listener.split()),
        *("gate.width", "gate.height"),
    ]
    assert all(setting.key == key for key, setting in keys.items())


def test_default_values(write):
    values = load(write("gate.enable = true"), [], [GATE]).values
    assert values == {
        "log.level": "info",
        "log.format": "text",
        "user": "",
        "group": "",
        "drain.mode": "close",
        "drain.timeout": 10,
        "tls.handshake_timeout": 5,
        "cluster.url": "",
        "cluster.credentials": "",
        "cluster.ca_file": "",
        "cluster.prefix": "",
        "cluster.lease": 10,
        "cluster.on_loss": "drop",
        "cluster.unreachable": "closed",
        "admin.enable": False,
        "admin.bind": "127.0.0.1:11216",
        "admin.token": "",
        "admin.allow": (),
        "admin.insecure": False,
        "admin.hosts": (),
        "gate.enable": True,
        "gate.port": 7000,
        "gate.bind": ("127.0.0.1", "::1"),
        "gate.insecure": False,
        "gate.allow": (),
        "gate.tls.cert": "",
        "gate.tls.key": "",
        "gate.tls.client_ca": "",
        "gate.tls.require_client_cert": False,
        "gate.socket": "",
        "gate.socket_mode": 0o660,
        "gate.socket_user": "",
        "gate.socket_group": "",
        "gate.socket_allow": (),
        "gate.max_connections": 0,
        "gate.max_connections_per_address": 0,
        "gate.max_requests_per_second": 0,
        "gate.idle_timeout": 0,
        "gate.keepalive_idle": 10,
        "gate.keepalive_interval": 2,
        "gate.keepalive_count": 7,
        "gate.user_timeout": 25,
        "gate.write_timeout": 25,
        "gate.width": 3,
        "gate.height": 2,
    }
    assert settings_for([GATE])["gate.enable"].default is False


def test_which_keys_are_fixed_while_running():
    fixed = [key for key, setting in settings_for([GATE]).items() if not setting.reload]
    assert fixed == [
        *("user", "group"),
        *(f"cluster.{name}" for name in ("url", "prefix", "lease")),
        *(f"admin.{name}" for name in ("enable", "bind", "insecure")),
        *(f"gate.{name}" for name in ("enable", "port", "bind", "insecure")),
        *(f"gate.{name}" for name in ("socket", "socket_mode", "socket_user", "socket_group", "height")),
    ]


# ---- values and origins ---------------------------------------------------------------------------------------------


def test_values_come_from_the_file_the_command_line_and_defaults(write):
    path = write("# a comment\n\ncounter.enable = true\ncounter.port = 1\nlog.level = debug\n")
    found = load(path, ["counter.port=2", "log.format = json"], [COUNTER])
    assert found.path == path
    assert found.warnings == ()
    assert {
        key: (found.values[key], found.origins[key]) for key in ("counter.enable", "counter.port", "log.level")
    } == {
        "counter.enable": (True, "F:3"),
        "counter.port": (2, "--set"),
        "log.level": ("debug", "F:5"),
    }
    assert (found.values["log.format"], found.origins["log.format"]) == ("json", "--set")
    assert (found.values["drain.timeout"], found.origins["drain.timeout"]) == (10, "default")
    assert found.values.keys() == found.origins.keys() == settings_for([COUNTER]).keys()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("counter.socket=/a", "/a"),
        (" \t\v\f counter.socket \t = \t /a \v\f\r", "/a"),
        ('counter.socket = "/a"', "/a"),
        ('counter.socket = " /a"', None),
        ('counter.socket = "/a b "', "/a b "),
        ('counter.socket = "/a" b', None),
        ('counter.socket = /a"', '/a"'),
        ('counter.socket = ""', ""),
        ("counter.socket =", ""),
        ("counter.socket = /a # b", "/a # b"),
        ("counter.socket = /a=b", "/a=b"),
        ("counter.socket = /ä\x85\u2028\x1c", "/ä\x85\u2028\x1c"),
        ('counter.socket = "', None),
    ],
)
def test_the_syntax_of_a_line(write, problems, line, value):
    if value is None:
        assert len(problems(ON + line)) == 1
    else:
        assert load(write(ON + line), [], [COUNTER]).values["counter.socket"] == value


def test_an_alias_is_the_same_key(write):
    found = load(write(ON + "counter.stat_interval = 60"), [], [COUNTER])
    assert (found.values["counter.stats_interval"], found.origins["counter.stats_interval"]) == (60, "F:2")
    assert "counter.stat_interval" not in found.values
    found = load(write(ON + "counter.stats_interval = 60"), ["counter.stat_interval=70"], [COUNTER])
    assert (found.values["counter.stats_interval"], found.origins["counter.stats_interval"]) == (70, "--set")


def test_an_override_repairs_a_file(write):
    found = load(write(ON + "user = no-such-user\ncounter.port = x"), ["user=", "counter.port=1"], [COUNTER])
    assert (found.values["user"], found.values["counter.port"]) == ("", 1)


def test_users_and_groups_have_a_name_or_a_number(write):
    user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())
    by_name = load(write(f"{ON}user = {user.pw_name}\ngroup = {group.gr_name}"), [], [COUNTER]).values
    assert (by_name["user"], by_name["group"]) == (user.pw_name, group.gr_name)
    by_number = load(write(f"{ON}user = {user.pw_uid}\ngroup = {group.gr_gid}"), [], [COUNTER]).values
    assert (by_number["user"], by_number["group"]) == (str(user.pw_uid), str(group.gr_gid))


def test_the_longest_path_of_a_socket(write, problems):
    longest = "/" + "ä" * 53
    assert len(longest.encode()) == 107
    assert load(write(f"{ON}counter.socket = {longest}"), [], [COUNTER]).values["counter.socket"] == longest
    assert problems(f"{ON}counter.socket = {longest}a") == [
        "F:2: counter.socket: the path has 108 bytes; the path of a Unix socket can have 107"
    ]


def test_an_enabled_protocol_may_have_addresses_or_a_socket_alone(write):
    values = load(write(ON + "counter.bind =\ncounter.socket = /run/counter"), [], [COUNTER]).values
    assert (values["counter.bind"], values["counter.socket"]) == ((), "/run/counter")


def test_one_enabled_protocol_is_enough(write):
    values = load(write("gate.enable = true\ncounter.bind ="), [], [COUNTER, GATE]).values
    assert (values["gate.enable"], values["counter.enable"]) == (True, False)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def reachable(address: str) -> str:
    return (
        f"F:2: counter.bind: {address} can be reached from other machines by everybody: set counter.tls.cert, or"
        " counter.allow, or counter.insecure = true if that is intended"
    )


MISTAKES = [
    ("counter.port", ["F:2: expected key = value, not 'counter.port'"]),
    ("= 5", ["F:2: expected key = value, not '= 5'"]),
    ("nonsense_that_nobody_means = 5", ["F:2: unknown key 'nonsense_that_nobody_means'"]),
    ("counter.prot = 5", ["F:2: unknown key 'counter.prot', did you mean counter.port?"]),
    ("counter.own_port = 5", ["F:2: unknown key 'counter.own_port', did you mean counter.port?"]),
    ("stats_interval = 50", ["F:2: unknown key 'stats_interval', did you mean counter.stats_interval?"]),
    ("counter.\x1bport = 5", ["F:2: unknown key 'counter.\\x1bport', did you mean counter.port?"]),
    ("log.threshhold = info", ["F:2: unknown key 'log.threshhold'"]),
    ("counter.port = http", ["F:2: counter.port: expected a whole number, not 'http'"]),
    ("counter.port = 65536", ["F:2: counter.port: 65536 is out of range, expected 0 to 65535"]),
    ("counter.stat_interval = 9", ["F:2: counter.stat_interval: 9 is out of range, expected 10 to 2147483648"]),
    ("log.level = loud", ["F:2: log.level: expected one of error, warning, info, debug, not 'loud'"]),
    ("drain.timeout = 3601", ["F:2: drain.timeout: 3601 is out of range, expected 0 to 3600"]),
    ("counter.keepalive_idle = 0", ["F:2: counter.keepalive_idle: 0 is out of range, expected 1 to 32767"]),
    ("counter.keepalive_interval = 0", ["F:2: counter.keepalive_interval: 0 is out of range, expected 1 to 32767"]),
    ("counter.keepalive_count = 128", ["F:2: counter.keepalive_count: 128 is out of range, expected 1 to 127"]),
    ("counter.user_timeout = 0", ["F:2: counter.user_timeout: 0 is out of range, expected 1 to 3600"]),
    ("counter.write_timeout = 0", ["F:2: counter.write_timeout: 0 is out of range, expected 1 to 3600"]),
    ("counter.max_connections = -1", ["F:2: counter.max_connections: -1 is out of range, expected 0 to 2147483647"]),
    ("counter.bind = localhost", ["F:2: counter.bind: expected IP addresses, not 'localhost'"]),
    ("counter.socket = /", ["F:2: counter.socket: expected the path of a Unix socket, not the folder /"]),
    ("admin.bind = unix:/", ["F:2: admin.bind: expected the path of a Unix socket, not the folder /"]),
    ("counter.socket = run/x", ["F:2: counter.socket: expected an absolute path, not 'run/x'"]),
    ("counter.socket = /a\0b", ["F:2: counter.socket: expected a path without NUL, not '/a\\x00b'"]),
    ("user = no-such-user", ["F:2: user: this machine has no user 'no-such-user'"]),
    ("user = 4294967294", ["F:2: user: this machine has no user '4294967294'"]),
    ("user = a\0b", ["F:2: user: this machine has no user 'a\\x00b'"]),
    ("group = no-such-group", ["F:2: group: this machine has no group 'no-such-group'"]),
    ("group = 4294967294", ["F:2: group: this machine has no group '4294967294'"]),
    ("group = 99999999999", ["F:2: group: this machine has no group '99999999999'"]),
    ("drain.timeout = 10s", ["F:2: drain.timeout: expected a whole number of seconds, not '10s'"]),
    ("counter.port = 1\n#\ncounter.port = 1", ["F:4: counter.port is set twice, first in F:2"]),
    (
        "counter.stats_interval = 60\ncounter.stat_interval = 60",
        ["F:3: counter.stat_interval is set twice, first as counter.stats_interval in F:2"],
    ),
    ("counter.bind = ::1 0.0.0.0 192.0.2.1", [reachable("0.0.0.0"), reachable("192.0.2.1")]),
    ("counter.bind = ::", [reachable("::")]),
    (
        "counter.bind = ::\ncounter.tls.client_ca = /ca",
        [reachable("::"), "F:3: counter.tls.client_ca needs counter.tls.cert"],
    ),
    ("counter.allow = 10.0.0.1/8", ["F:2: counter.allow: 10.0.0.1/8 has bits beyond its prefix, expected 10.0.0.0/8"]),
    (
        "counter.allow = localhost",
        ["F:2: counter.allow: expected networks such as 10.0.0.0/8 or IP addresses, not 'localhost'"],
    ),
    ("counter.tls.cert = cert.pem", ["F:2: counter.tls.cert: expected an absolute path, not 'cert.pem'"]),
    ("counter.tls.key = /key", ["F:2: counter.tls.key needs counter.tls.cert"]),
    (
        "counter.tls.cert = /cert\ncounter.tls.require_client_cert = true",
        ["F:3: counter.tls.require_client_cert needs counter.tls.client_ca"],
    ),
    (
        "counter.socket_user = no-such-user",
        ["F:2: counter.socket_user: this machine has no user 'no-such-user'"],
    ),
    (
        "counter.socket_allow = root",
        ["F:2: counter.socket_allow: expected words such as user:NAME and group:NAME, not 'root'"],
    ),
    (
        "counter.socket_allow = user:0 group:no-such-group",
        ["F:2: counter.socket_allow: this machine has no group 'no-such-group'"],
    ),
    ("counter.idle_timeout = 86401", ["F:2: counter.idle_timeout: 86401 is out of range, expected 0 to 86400"]),
    ("tls.handshake_timeout = 0", ["F:2: tls.handshake_timeout: 0 is out of range, expected 1 to 60"]),
    ("drain.mode = slow", ["F:2: drain.mode: expected one of close, wait, not 'slow'"]),
    *(
        (
            f"admin.bind = {text}",
            [f"F:2: admin.bind: expected an IP address and a port, or unix:/absolute/path, not '{text}'"],
        )
        for text in (
            "",
            "11216",
            "::1:11216",
            "[127.0.0.1]:80",
            "127.0.0.1",
            "127.0.0.1:65536",
            "localhost:80",
            "unix:a",
        )
    ),
    (
        "admin.bind = unix:/" + "a" * 107,
        ["F:2: admin.bind: the path has 108 bytes; the path of a Unix socket can have 107"],
    ),
    ("admin.token = a b", ["F:2: admin.token: expected at most 1024 visible ASCII characters without spaces"]),
    ("admin.hosts = a.example -b", ["F:2: admin.hosts: expected host names, not '-b'"]),
    (
        "admin.enable = true\nadmin.bind = 0.0.0.0:11216",
        [
            "F:3: admin.bind: 0.0.0.0 can be reached from other machines by everybody: set admin.allow, or"
            " admin.insecure = true if that is intended"
        ],
    ),
    ("counter.bind =", ["F:2: counter is enabled but listens nowhere: counter.bind and counter.socket are both empty"]),
]


@pytest.fixture
def admin_installed(monkeypatch):
    monkeypatch.setattr(config, "ADMIN_NEEDS", "asyncio")


@pytest.mark.usefixtures("admin_installed")
@pytest.mark.parametrize(("lines", "messages"), MISTAKES)
def test_a_mistake_in_the_file(problems, lines, messages):
    assert problems(ON + lines) == messages


OVERRIDE_MISTAKES = [
    (["counter.port"], ["--set: expected key = value, not 'counter.port'"]),
    (["counter.prot=5"], ["--set counter.prot=5: unknown key 'counter.prot', did you mean counter.port?"]),
    (["port=5"], ["--set port=5: unknown key 'port'"]),
    (["counter.port=x"], ["--set counter.port=x: counter.port: expected a whole number, not 'x'"]),
    (["a=b\nc"], ["--set a=b\\nc: unknown key 'a'"]),
    (["a=\udcff"], ["--set a=\\udcff: unknown key 'a'"]),
    (
        ["counter.port=1", "counter.port=2"],
        ["--set counter.port=2: counter.port is set twice, first in --set counter.port=1"],
    ),
    (
        ["counter.bind="],
        ["--set counter.bind=: counter is enabled but listens nowhere: counter.bind and counter.socket are both empty"],
    ),
    (["counter.enable=false"], ["F: no protocol is enabled, set counter.enable = true"]),
]


@pytest.mark.parametrize(("overrides", "messages"), OVERRIDE_MISTAKES)
def test_a_mistake_on_the_command_line(problems, overrides, messages):
    assert problems(ON, *overrides) == messages


def test_a_configuration_without_an_enabled_protocol_is_refused(problems):
    assert problems("") == ["F: no protocol is enabled, set counter.enable = true"]
    assert problems("gate.enable = false", specs=[COUNTER, GATE]) == [
        "F: no protocol is enabled, set counter.enable or gate.enable = true"
    ]


def test_a_mistake_causes_no_further_messages(problems):
    assert problems("counter.enable = yes") == ["F:1: counter.enable: expected true or false, not 'yes'"]
    assert problems(ON + "counter.bind = x") == ["F:2: counter.bind: expected IP addresses, not 'x'"]
    assert problems(ON + "counter.bind =\ncounter.socket = x") == [
        "F:3: counter.socket: expected an absolute path, not 'x'"
    ]


def test_all_mistakes_are_reported_at_once(problems):
    assert problems(b"zzzzzzzz\nlog.level = \xff\nqqqqqqqq = 1\nuser =\nuser =\ncounter.port = x", "zzzzzzzz=1") == [
        "F:1: expected key = value, not 'zzzzzzzz'",
        "F:2: byte 0xff at position 13 is not UTF-8",
        "F:3: unknown key 'qqqqqqqq'",
        "F:5: user is set twice, first in F:4",
        "--set zzzzzzzz=1: unknown key 'zzzzzzzz'",
        "F:6: counter.port: expected a whole number, not 'x'",
        "F: no protocol is enabled, set counter.enable = true",
    ]


def test_a_comment_may_have_any_encoding(write):
    assert load(write(b"counter.enable = true\n  # caf\xe9\n"), [], [COUNTER]).values["counter.enable"]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
    ids=["missing", "directory", "loop"],
)
def test_a_file_that_cannot_be_read_is_one_mistake(tmp_path, prepare, reason):
    path = tmp_path / "x.conf"
    prepare(path)
    with pytest.raises(ConfigError) as caught:
        load(path, ["no-such-key=1"], [COUNTER])
    assert caught.value.problems == (f"{path}: cannot be read: {reason}",)


def test_a_file_name_cannot_break_a_message(tmp_path):
    path = tmp_path / "a\nb"
    path.write_text("x")
    with pytest.raises(ConfigError) as caught:
        load(path, [], [COUNTER])
    assert caught.value.problems[0] == f"{tmp_path}/a\\nb:1: expected key = value, not 'x'"


# ---- any bytes ------------------------------------------------------------------------------------------------------

NAMES = [*settings_for([COUNTER]), *COUNTER.aliases, *COUNTER.foreign_file.keys, "nonsense"]
VALUES = [
    "",
    "true",
    "false",
    "0",
    "11215",
    "10M",
    "0660",
    "/run/x",
    "info",
    "json",
    "::1",
    "10.0.0.1 ::",
    '"x"',
    "root",
]
LINES = st.builds(
    "{} = {}".format, st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(st.characters(), max_size=20)
)
CONTENTS = st.binary(max_size=200) | st.lists(LINES, max_size=12).map(
    lambda lines: "\n".join(lines).encode(errors="surrogatepass")
)


@settings(deadline=None)
@given(CONTENTS, st.lists(LINES | st.text(st.characters(), max_size=20), max_size=3))
def test_any_file_and_overrides_are_a_configuration_or_a_config_error(tmp_path_factory, content, overrides):
    path = tmp_path_factory.getbasetemp() / "any.conf"
    path.write_bytes(content)
    found, problems = None, ()
    try:
        found = load(path, overrides, [COUNTER])
    except ConfigError as error:
        problems = error.problems
    assert all(problem.isprintable() and problem.startswith((str(path), "--set")) for problem in problems)
    if found is None:
        assert problems
    else:
        assert found.values.keys() == found.origins.keys() == settings_for([COUNTER]).keys()
        assert found.values["counter.enable"]
        assert all(origin in ("--set", "default") or origin.startswith(f"{path}:") for origin in found.origins.values())


# ---- what only some may reach ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["counter.tls.cert = /cert", "counter.allow = 10.0.0.0/8", "counter.insecure = true"])
def test_tls_allow_or_insecure_permits_reachable_addresses(write, line):
    found = load(write(ON + "counter.bind = 0.0.0.0 ::\n" + line), [], [COUNTER])
    assert found.values["counter.bind"] == ("0.0.0.0", "::")
    assert found.warnings == ()


def test_a_protocol_that_is_off_may_have_any_address(write):
    load(write(ON + "gate.bind = ::"), [], [COUNTER, GATE])


@pytest.mark.usefixtures("admin_installed")
@pytest.mark.parametrize(
    ("lines", "bind"),
    [
        ("admin.bind = 0.0.0.0:80\nadmin.allow = 10.0.0.0/8", ("0.0.0.0", 80)),
        ("admin.bind = [::]:80\nadmin.insecure = true", ("::", 80)),
        ("admin.bind = [::1]:0", ("::1", 0)),
        ("admin.bind = unix:/run/admin", ("/run/admin", -1)),
    ],
)
def test_addresses_on_which_admin_may_be_served(write, lines, bind):
    found = load(write(f"{ON}admin.enable = true\n{lines}"), [], [COUNTER])
    assert split_bind(found.values["admin.bind"]) == bind


def test_admin_without_its_packages_is_an_error(problems, monkeypatch):
    monkeypatch.setattr(config, "ADMIN_NEEDS", "no_such_module")
    assert problems(ON + "admin.enable = true") == [
        "F:2: admin.enable needs the extra admin: in the source tree, run `make setup` or pip install '.[admin]'"
    ]


def test_a_token_is_not_shown(problems):
    assert problems(ON, "admin.token=my secret") == [
        "--set admin.token=...: admin.token: expected at most 1024 visible ASCII characters without spaces"
    ]
    assert problems(ON, "admin.token: secret") == ["--set: expected key = value, not ..."]
    assert problems(f"{ON}admin.token secret\n") == ["F:2: expected key = value, not ..."]
    assert problems(f"{ON}admin.token: secret==\n") == ["F:2: expected key = value, not ..."]
    assert problems(ON, "admin.token secret==") == ["--set: expected key = value, not ..."]
    assert problems(f"{ON}admin.tokens = 1\n") == ["F:2: unknown key 'admin.tokens', did you mean admin.token?"]


# ---- changes --------------------------------------------------------------------------------------------------------


def test_changed_separates_changeable_and_fixed_keys(write):
    old = load(write("gate.enable = true\ngate.width = 4\ngate.port = 1"), [], [GATE])
    same = load(write("gate.breadth = 4\ngate.enable = true\n"), ["gate.port = 1"], [GATE])
    new = load(write("gate.enable = true\ngate.height = 1\nlog.level = debug\ngate.port = 2"), [], [GATE])
    assert changed(old, same, settings_for([GATE])) == ([], [])
    assert changed(old, new, settings_for([GATE])) == (["log.level", "gate.width"], ["gate.port", "gate.height"])


def test_merged_keeps_fixed_keys(write):
    old = load(write(ON + "counter.port = 1\ncounter.max_connections = 1"), [], [COUNTER])
    new = load(write(ON + "counter.max_connections = 2"), [], [COUNTER])
    both = merged(old, new, ["counter.port"], [COUNTER])
    assert (both.values["counter.port"], both.origins["counter.port"]) == (1, "F:2")
    assert (both.values["counter.max_connections"], both.origins["counter.max_connections"]) == (2, "F:2")


def test_merged_refuses_to_drop_the_allow_list_of_a_fixed_address(write):
    """The old address stays until a restart, so it must keep the list of those who may connect."""
    old = load(write(ON + "counter.bind = 192.0.2.1\ncounter.allow = 192.0.2.0/24"), [], [COUNTER])
    new = load(write(ON), [], [COUNTER])
    with pytest.raises(ConfigError) as caught:
        merged(old, new, ["counter.bind"], [COUNTER])
    assert caught.value.problems == (
        reachable("192.0.2.1").replace("F:2", "F") + " (these keys cannot change until a restart: counter.bind)",
    )


# ---- which file -----------------------------------------------------------------------------------------------------


def test_which_configuration_file_is_used(tmp_path, monkeypatch):
    system = tmp_path / "etc" / "counterd.conf"
    monkeypatch.setattr(config, "SYSTEM_FILE", system)
    assert find_file(Path("given.conf")) == Path("given.conf")
    assert find_file(None) == SHIPPED
    system.parent.mkdir()
    system.touch()
    assert find_file(None) == system
    assert find_file(Path("given.conf")) == Path("given.conf")


def test_an_inaccessible_system_file_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "etc").touch()
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "etc" / "counterd.conf")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load(find_file(None), [], [COUNTER])


def test_the_system_file_is_where_it_is_documented():
    assert Path("/etc/counterd/counterd.conf") == config.SYSTEM_FILE


# ---- the shipped file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "overrides", "mode", "warned"),
    [
        ("admin.token = 16-characters-or-more", [], 0o644, True),
        ("admin.token = 16-characters-or-more", [], 0o640, False),
        ("admin.token =", [], 0o644, False),
        ("admin.token = 16-characters-or-more", ["admin.token=another-one-of-16-and-more"], 0o644, False),
    ],
)
def test_a_token_in_a_readable_file_warns(write, line, overrides, mode, warned):
    path = write(f"counter.enable = true\n{line}\nadmin.enable = true\n")
    path.chmod(mode)
    warnings = load(path, overrides, find_protocols()).warnings
    expected = "F:2: admin.token: every user of this machine can read the file; run chmod o= F"
    assert warnings == ((expected,) if warned else ())


def shipped_keys() -> dict[str, tuple[bool, str, str]]:
    """Each key in the shipped file: whether it is set there, its value and the comment above it."""
    found = {}
    for paragraph in SHIPPED.read_text().split("\n\n"):
        *comment, last = paragraph.rstrip().split("\n")
        if match := re.fullmatch(r"(# )?([a-z0-9_.]+) =(?: (.*))?", last):
            assert match[2] not in found
            found[match[2]] = (match[1] is None, match[3] or "", "\n".join(comment))
    return found


def test_the_shipped_file_has_every_key_with_its_default():
    keys, found = settings_for(find_protocols()), shipped_keys()
    of_each = [f"{spec.name}{key.removeprefix('listener')}" for key in shared_settings() for spec in find_protocols()]
    assert found.keys() == (keys.keys() | shared_settings().keys()) - set(of_each)
    keys |= shared_settings()
    assert {key for key, (is_set, _, _) in found.items() if is_set} == {"counter.enable"}
    for key, (is_set, value, comment) in found.items():
        setting = keys[key]
        assert is_set or setting.read(value) == setting.default, key
        assert comment, key
        assert setting.unit.split(";")[0] in comment, key
        assert setting.reload == ("(reload)" in comment), key


def test_the_shipped_file_works_and_turns_the_counter_protocol_on():
    found = load(SHIPPED, [], find_protocols())
    defaults = {key: setting.default for key, setting in settings_for(find_protocols()).items()}
    assert found.values == defaults | {"counter.enable": True}
    assert not defaults["counter.enable"]
    assert found.warnings == ()


def test_the_shipped_file_is_the_one_in_conf():
    link = ROOT / "conf" / "counterd.conf"
    assert link.readlink() == Path("../src/counterd/counterd.conf")
    assert link.read_bytes() == SHIPPED.read_bytes()


def test_a_configuration_is_immutable(write):
    found = load(write(ON), [], [COUNTER])
    assert isinstance(found, Config)
    with pytest.raises(AttributeError):
        found.path = Path("other")
