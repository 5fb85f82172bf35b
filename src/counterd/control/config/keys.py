"""The keys of the daemon, of every protocol's listener, and of the admin endpoint: how they are read, their defaults
and their units.

Floor 4 (ARCHITECTURE.md). Each class is a part of the configuration, and each field of a class is a key. Code that
needs a part of the configuration gets an object of its class. The keys of a single protocol are in the PROTOCOL of that
protocol. A key of a listener can be set once for all protocols, as `listener.KEY`; a key of a single protocol overrides
it. loading.py checks whether the values are consistent.
"""

from __future__ import annotations

import grp
import ipaddress
import pwd
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from counterd.settings import (
    REDIS_EXPECTED,
    Reader,
    Setting,
    absolute_path,
    addresses,
    boolean,
    choice,
    integer,
    networks,
    octal_mode,
    setting,
    settings_of,
    socket_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from counterd.contract import ProtocolSpec

# Limits of the kernel, tcp(7): TCP_KEEPIDLE, _KEEPINTVL and _KEEPCNT.
KEEPALIVE_SECONDS_MAX = 32767
KEEPALIVE_COUNT_MAX = 127
TIMEOUT_MAX = 3600
HANDSHAKE_TIMEOUT_MAX = 60  # an unauthenticated client can keep a connection for this long
IDLE_TIMEOUT_MAX = 86400
CONNECTIONS_MAX = (1 << 31) - 1
REQUESTS_MAX = 1_000_000_000  # per second: more than any connection can send
TOKEN_MAX = 1024  # characters: the token has to fit into an HTTP header
PORT_MAX = 65535
REDIS_PORT = 6379  # the port that Redis uses unless it is told another one
PREFIX_MAX = 255  # bytes of cluster.prefix, which a store compares with each name
LEASE_MAX = 3600  # seconds: so long the permits of a daemon that was killed are missing

ACCOUNTS: dict[str, tuple[Callable[[str], int], Callable[[int], object]]] = {
    "user": (lambda name: pwd.getpwnam(name).pw_uid, pwd.getpwuid),
    "group": (lambda name: grp.getgrnam(name).gr_gid, grp.getgrgid),
}
UNIX_PREFIX = "unix:"
ADMIN = "admin"
LISTENER = "listener"


# ---- readers --------------------------------------------------------------------------------------------------------


def account_number(kind: str, text: str) -> int:
    """Returns the uid or gid of a user or group.

    kind: "user" or "group". text: its name or number. Raises LookupError if this machine does not have the user or
    group.
    """
    by_name, by_number = ACCOUNTS[kind]
    try:
        if re.fullmatch("[0-9]+", text):
            by_number(int(text))
            return int(text)
        return by_name(text)
    except (KeyError, ValueError, OverflowError):  # a NUL, more digits than int() accepts, a number beyond all ids
        raise LookupError(f"this machine has no {kind} {text!r}") from None


def _account(kind: str) -> Reader:
    """Reads the name or number of a user or group that exists on this machine. An empty text means none."""

    def read(text: str) -> str:
        try:
            if text:
                account_number(kind, text)
        except LookupError as error:
            raise ValueError(*error.args) from None
        return text

    return read


def _accounts(text: str) -> tuple[str, ...]:
    """Reads words such as user:NAME and group:NAME."""
    words = text.replace(",", " ").split()
    for word in words:
        kind, colon, name = word.partition(":")
        if kind not in ACCOUNTS or not colon or not name:
            raise ValueError(f"expected words such as user:NAME and group:NAME, not {word!r}")
        _account(kind)(name)
    return tuple(dict.fromkeys(words))


def split_bind(text: str) -> tuple[str, int]:
    """Splits a valid value of admin.bind into an IP address and a port, or into the path of a Unix socket and -1."""
    if text.startswith(UNIX_PREFIX):
        return text.removeprefix(UNIX_PREFIX), -1
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def shown(address: str, port: int) -> str:
    """Formats an IP address and a port, or a path and -1, for people."""
    if port < 0:
        return UNIX_PREFIX + address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def admin_bind(text: str) -> str:
    """Reads a value of admin.bind: an IP address with a port, such as 127.0.0.1:11216 or [::1]:11216, or unix: and an
    absolute path."""
    if text.startswith(UNIX_PREFIX + "/"):
        socket_path(text.removeprefix(UNIX_PREFIX))
        return text
    match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<four>[0-9.]+)):(?P<port>[0-9]{1,5})", text)
    try:
        if match is None or int(match["port"]) > 65535:
            raise ValueError
        ipaddress.IPv6Address(match["six"]) if match["six"] else ipaddress.IPv4Address(match["four"])
    except ValueError:
        raise ValueError(f"expected an IP address and a port, or unix:/absolute/path, not {text!r}") from None
    return text


def _token(text: str) -> str:
    """Reads a token that can be sent in an HTTP header. Error messages do not contain the token."""
    if not re.fullmatch(f"[!-~]{{0,{TOKEN_MAX}}}", text):
        raise ValueError(f"expected at most {TOKEN_MAX} visible ASCII characters without spaces")
    return text


class Servers(NamedTuple):
    """The parts of a value of cluster.url. user, password: "" if they are not in it."""

    places: list[tuple[str, int]]
    user: str
    password: str
    is_tls: bool


_SERVER = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?"
_SERVERS = re.compile(f"redis(s?)://(?:([^:@/ ]*):([^@/ ]+)@)?({_SERVER}(?:,{_SERVER})*)/?")


def split_servers(text: str) -> Servers:
    """Splits a valid value of cluster.url that is not empty."""
    match = _SERVERS.fullmatch(text)
    assert match is not None
    places = []
    for each in match[4].split(","):
        host, colon, port = each.rpartition(":") if not each.endswith("]") else (each, "", "")
        places.append((host.strip("[]"), int(port)) if colon else (each.strip("[]"), REDIS_PORT))
    return Servers(places, unquote(match[2] or ""), unquote(match[3] or ""), bool(match[1]))


def read_servers(text: str) -> str:
    """Reads redis:// or rediss:// and the addresses of servers. Error messages do not contain the text, because it may
    contain a password."""
    if text:
        if not _SERVERS.fullmatch(text):
            raise ValueError("expected redis://HOST:PORT,HOST:PORT or rediss://USER:PASSWORD@HOST:PORT,HOST:PORT")
        if any(not 0 < port <= PORT_MAX for _, port in split_servers(text).places):
            raise ValueError(f"expected ports from 1 to {PORT_MAX}")
    return text


class RedisAddress(NamedTuple):
    """The parts of the URL of a Redis. host: also the path of a Unix socket, with the port -1. user, password, ca_file:
    "" if they are not in it."""

    host: str
    port: int
    database: int
    user: str
    password: str
    is_tls: bool
    ca_file: str


_REDIS_OPTIONS = ("db", "username", "password", "ssl_ca_certs")


def split_redis(text: str) -> RedisAddress:
    """Splits a valid value of a setting for the URL of a Redis. Raises ValueError, without the URL, because it may
    contain a password."""
    try:
        url = urlsplit(text)
        port, host = url.port, url.hostname
        options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
    except ValueError:  # its message may have the URL in it
        raise ValueError(REDIS_EXPECTED) from None
    if url.fragment:
        raise ValueError(REDIS_EXPECTED)
    if not options.keys() <= {*_REDIS_OPTIONS}:
        raise ValueError(f"expected no options after ? but {', '.join(_REDIS_OPTIONS)}")
    is_unix, is_tls, path = url.scheme == "unix", url.scheme == "rediss", unquote(url.path)
    database = options.get("db", "" if is_unix else path.strip("/"))
    if not re.fullmatch("[0-9]{0,9}", database):
        raise ValueError("expected the number of a database, as in redis://HOST:PORT/0 or unix:///PATH?db=0")
    if "ssl_ca_certs" in options and not is_tls:
        raise ValueError("ssl_ca_certs needs rediss://")
    if is_unix and (host or not socket_path(path)):
        raise ValueError(REDIS_EXPECTED)
    return RedisAddress(
        path if is_unix else unquote(host or "localhost"),
        -1 if is_unix else REDIS_PORT if port is None else port,
        int(database or 0),
        options.get("username", unquote(url.username or "")),
        options.get("password", unquote(url.password or "")),
        is_tls,
        absolute_path(options.get("ssl_ca_certs", "")),
    )


def _prefix(text: str) -> str:
    """Reads the beginning of names."""
    if len(text.encode()) > PREFIX_MAX:
        raise ValueError(f"expected at most {PREFIX_MAX} bytes")
    return text


def _hosts(text: str) -> tuple[str, ...]:
    """Reads host names, and converts them to lower case."""
    words = text.replace(",", " ").lower().split()
    for word in words:
        if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?", word):
            raise ValueError(f"expected host names, not {word!r}")
    return tuple(dict.fromkeys(words))


# ---- the keys -------------------------------------------------------------------------------------------------------

AUTHORITIES = "absolute path; empty means that clients are not asked for a certificate"
SECONDS = integer(1, KEEPALIVE_SECONDS_MAX)
TIMEOUT = integer(1, TIMEOUT_MAX)
CONNECTIONS = integer(0, CONNECTIONS_MAX)


@dataclass(frozen=True)
class Log:
    level: str = setting(choice("error", "warning", "info", "debug"), "info", reload=True)
    format: str = setting(choice("text", "json"), "text", reload=True)


@dataclass(frozen=True)
class Drain:
    mode: str = setting(choice("close", "wait"), "close", reload=True)
    timeout: int = setting(integer(0, TIMEOUT_MAX), 10, "seconds", reload=True)


@dataclass(frozen=True)
class Handshake:
    handshake_timeout: int = setting(integer(1, HANDSHAKE_TIMEOUT_MAX), 5, "seconds", reload=True)


@dataclass(frozen=True)
class Cluster:
    """The keys for limits that daemons share."""

    url: str = setting(
        read_servers, "", "redis:// or rediss:// and addresses; empty means that nothing is shared", secret=True
    )
    credentials: str = setting(
        absolute_path, "", "absolute path; empty means that servers ask for no password", reload=True
    )
    ca_file: str = setting(absolute_path, "", "absolute path; empty means the authorities of the system", reload=True)
    prefix: str = setting(_prefix, "", "the beginning of names; empty means all names")
    lease: int = setting(integer(1, LEASE_MAX), 10, "seconds")
    on_loss: str = setting(choice("drop", "keep"), "drop", reload=True)
    unreachable: str = setting(choice("closed", "share", "open"), "closed", reload=True)


@dataclass(frozen=True)
class Process:
    """The keys of the daemon."""

    log: Log = field(default_factory=Log)
    user: str = setting(_account("user"), "", "name or number")
    group: str = setting(_account("group"), "", "name or number")
    drain: Drain = field(default_factory=Drain)
    tls: Handshake = field(default_factory=Handshake)
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True)
class Endpoint:
    """The keys of the admin endpoint."""

    enable: bool = setting(boolean, False)
    bind: str = setting(admin_bind, "127.0.0.1:11216", "IP address and port, or unix: and an absolute path")
    token: str = setting(
        _token,
        "",
        "visible ASCII characters; empty means that no request can change anything",
        reload=True,
        secret=True,
    )
    allow: tuple[str, ...] = setting(networks, (), "networks or addresses; empty means everybody", reload=True)
    insecure: bool = setting(boolean, False)
    hosts: tuple[str, ...] = setting(_hosts, (), "host names", reload=True)


@dataclass(frozen=True)
class TLS:
    cert: str = setting(absolute_path, "", "absolute path; empty means no TLS", reload=True)
    key: str = setting(
        absolute_path,
        "",
        "absolute path; empty means that the private key is in the file of the certificate",
        reload=True,
    )
    client_ca: str = setting(absolute_path, "", AUTHORITIES, reload=True)
    require_client_cert: bool = setting(boolean, False, reload=True)


@dataclass(frozen=True)
class Listener:
    """The keys that every protocol has. Each protocol defines the default of its port."""

    enable: bool = setting(boolean, False)
    port: int = setting(integer(0, 65535), 0, "TCP port; 0 means that the kernel chooses a free port")
    bind: tuple[str, ...] = setting(
        addresses, ("127.0.0.1", "::1"), "IP addresses; empty means that counterd does not listen for TCP"
    )
    insecure: bool = setting(boolean, False)
    allow: tuple[str, ...] = setting(networks, (), "networks or addresses; empty means everybody", reload=True)
    tls: TLS = field(default_factory=TLS)
    socket: str = setting(socket_path, "", "absolute path; empty means no Unix socket")
    socket_mode: int = setting(octal_mode, 0o660, "octal permissions")
    socket_user: str = setting(_account("user"), "", "name or number")
    socket_group: str = setting(_account("group"), "", "name or number")
    socket_allow: tuple[str, ...] = setting(
        _accounts, (), "user:NAME and group:NAME; empty means everybody", reload=True
    )
    max_connections: int = setting(CONNECTIONS, 0, "connections; 0 means no limit", reload=True)
    max_connections_per_address: int = setting(CONNECTIONS, 0, "connections; 0 means no limit", reload=True)
    max_requests_per_second: int = setting(
        integer(0, REQUESTS_MAX), 0, "requests a second; 0 means no limit", reload=True
    )
    idle_timeout: int = setting(integer(0, IDLE_TIMEOUT_MAX), 0, "seconds; 0 means no limit", reload=True)
    keepalive_idle: int = setting(SECONDS, 10, "seconds", reload=True)
    keepalive_interval: int = setting(SECONDS, 2, "seconds", reload=True)
    keepalive_count: int = setting(integer(1, KEEPALIVE_COUNT_MAX), 7, "probes", reload=True)
    user_timeout: int = setting(TIMEOUT, 25, "seconds", reload=True)
    write_timeout: int = setting(TIMEOUT, 25, "seconds", reload=True)


class Port(NamedTuple):
    """A port of a protocol.

    name: the name in messages; for the first port this is the protocol's name. prefix: how the port's keys begin.
    """

    protocol: str
    name: str
    prefix: str

    def key(self, field: str) -> str:
        """Returns the key of a setting of the port, which is `port` or `socket`."""
        return self.prefix + field


def ports_of(spec: ProtocolSpec) -> list[Port]:
    """Returns the ports of a protocol, in order."""
    first = Port(spec.name, spec.name, f"{spec.name}.")
    return [first, *(Port(spec.name, f"{spec.name}-{name}", f"{spec.name}.{name}_") for name in spec.ports)]


# Keys that protocols cannot share: each protocol has its own switch, port and path.
NOT_SHARED = ("enable", "port", "socket")


def settings_for(specs: Iterable[ProtocolSpec]) -> dict[str, Setting]:
    """Returns all settings by key: first those of the daemon, then for each protocol those of its listener and its
    own."""
    found = [*settings_of(Process), *settings_of(Endpoint, f"{ADMIN}.")]
    for spec in specs:
        for one in settings_of(Listener, f"{spec.name}."):
            found.append(replace(one, default=spec.default_port) if one.key == f"{spec.name}.port" else one)
        found += settings_of(spec.settings, f"{spec.name}.")
    return {one.key: one for one in found}


def shared_settings() -> dict[str, Setting]:
    """Returns the keys for the listeners of all protocols."""
    excluded = [f"{LISTENER}.{name}" for name in NOT_SHARED]
    return {one.key: one for one in settings_of(Listener, f"{LISTENER}.") if one.key not in excluded}
