"""Reads the configuration from a file and the command line.

Floor 4 (ARCHITECTURE.md). Each line of the file is `key = value`. counterd reads the file to its end, so ConfigError
lists all mistakes. Each message begins with the place where the key was set. If --set sets a key, the value of this key
in the file is not checked. So --set can replace a wrong value in the file. `listener.KEY` sets KEY for each protocol
that does not set KEY itself. The order of the lines in the file does not matter. This module does not apply the values
to the process.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import ipaddress
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import counterd
from counterd.control.config.keys import (
    ADMIN,
    LISTENER,
    NOT_SHARED,
    Endpoint,
    Listener,
    Port,
    Process,
    ports_of,
    settings_for,
    shared_settings,
    shown,
    split_bind,
    split_redis,
    split_servers,
)
from counterd.control.files import FileError, read_file
from counterd.control.log import one_line
from counterd.settings import WHOLE_NUMBER, Setting, assembled

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from counterd.contract import Journal, ProtocolSpec
    from counterd.control.process.systemd import Passed

SYSTEM_FILE = Path("/etc/counterd/counterd.conf")
SHIPPED_FILE = Path(counterd.__file__).with_name("counterd.conf")

FILE_MAX = 1 << 20  # bytes: fifty times the file that is shipped
# The time limit for a program that writes the configuration to a pipe: `counterd -c <(generate)`.
PIPE_TIMEOUT_S = 10.0

TOKEN_SHORT = 16  # characters: fewer are worth a warning
TIME_UNITS = ("seconds", "milliseconds")  # as people write 10s
OVERRIDE = "--set"
PASSED = "LISTEN_FDS"
SECRETS = {setting.key for setting in settings_for(()).values() if setting.secret}
BLANKS = " \t\n\r\v\f"

# Modules of the extras `admin` and `redis`: if one can be imported, the extra is installed.
ADMIN_NEEDS = "aiohttp"
SHARED_NEEDS = "hiredis"


class ConfigError(Exception):
    """All mistakes of a configuration. problems: one line for each mistake. str() joins these lines with newlines."""

    def __init__(self, problems: Iterable[str]) -> None:
        # Each once: a mistake in a key that protocols share is found for each of them.
        self.problems = tuple(dict.fromkeys(map(one_line, problems)))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Config:
    """A configuration without mistakes.

    values: the effective value of every known key, parsed, for listing and comparing. Other code takes its values from
        process, admin, listener() or own().
    origins: where each value was set: `FILE:LINE`, `--set` or `default`.
    warnings: lines for the operator, which the caller logs.
    path: the file that was read.
    sockets: the sockets that were passed to the process, by protocol, or "admin".
    shared: the name under which a value was set for all listeners, by key.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    path: Path
    sockets: Mapping[str, tuple[socket.socket, ...]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def process(self) -> Process:
        return assembled(Process, self.values)

    @functools.cached_property
    def admin(self) -> Endpoint:
        return assembled(Endpoint, self.values, f"{ADMIN}.")

    def listener(self, protocol: str) -> Listener:
        return assembled(Listener, self.values, f"{protocol}.")

    def own(self, spec: ProtocolSpec) -> Any:
        """Returns the keys of a single protocol, as an object of its class."""
        return assembled(spec.settings, self.values, f"{spec.name}.")

    def name(self, key: str) -> str:
        """Returns the name under which a key was set, for messages."""
        return self.shared.get(key, key)

    def place(self, key: str) -> str:
        """Returns the beginning of a message about the value of a key."""
        return f"{self.where(key)}: {self.name(key)}"

    def where(self, key: str) -> str:
        """Returns where a value was set, or the file in which it could be set, for messages."""
        origin = self.origins.get(key, "default")
        return str(self.path) if origin == "default" else origin


class Entry(NamedTuple):
    """A key with a value, as it was written."""

    name: str
    text: str
    origin: str

    @property
    def where(self) -> str:
        """The beginning of a message about this entry."""
        if self.origin != OVERRIDE:
            return self.origin
        return f"{OVERRIDE} {self.name}={'...' if self.name in SECRETS else self.text}"


# ---- reading --------------------------------------------------------------------------------------------------------


def find_file(explicit: Path | None) -> Path:
    """Returns the file to read: the file that the command line names, else the system's file if it exists, else the
    file in the package."""
    if explicit is not None:
        return explicit
    try:
        SYSTEM_FILE.lstat()
    except FileNotFoundError:
        return SHIPPED_FILE
    except OSError:
        pass  # the file may exist: load() reports why it cannot be read
    return SYSTEM_FILE


def load(
    path: Path,
    overrides: Sequence[str],
    specs: Sequence[ProtocolSpec],
    passed: Sequence[Passed] = (),
    pipe_timeout: float = 0.0,
) -> Config:
    """Reads the configuration from a file, and applies each `key=value` of --set.

    passed: the listening sockets that were passed to the process. A protocol with passed sockets opens no other
    sockets.
    pipe_timeout: if this is not 0, the file can be a pipe. The pipe must be completely written within this many
    seconds. Raises ConfigError with all mistakes.
    """
    problems: list[str] = []
    warnings: list[str] = []
    settings = settings_for(specs) | shared_settings()
    names: dict[str, str | None] = {key: key for key in settings}
    for spec in specs:
        names.update(spec.aliases)

    in_file = _entries(_lines(path, pipe_timeout, problems), problems)
    foreign = [
        (spec.name, spec.foreign_file)
        for spec in specs
        if spec.foreign_file is not None and any(entry.name in spec.foreign_file.keys for entry in in_file)
    ]
    for _, file in foreign:
        settings |= {one.key: one for one in file.settings}
        names |= file.keys
        if unused := dict.fromkeys(entry.name for entry in in_file if file.keys.get(entry.name, "") is None):
            keys = ", ".join(unused)
            warnings.append(
                f"{path} is a configuration file of {file.server}; counterd ignores these keys in it: {keys}"
            )
    given = _by_key(in_file, names, problems)
    given |= _by_key(_entries(((OVERRIDE, override) for override in overrides), problems), names, problems)

    values = _values(settings, given, problems)
    shared = _share(specs, values, given)
    for name, file in foreign:
        found = file.translate(values, given, functools.partial(exposed, name, values))
        warnings.extend(f"{path}: {warning}" for warning in found)
    warnings.extend(_readable_secrets(path, given))
    warnings.extend(_weak_token(values, given))
    warnings.extend(_set_but_off(specs, values, given))
    sockets = _assigned(passed, specs, values, given, problems)
    shared = {
        key: name for key, name in shared.items() if given[key].name == name
    }  # without the keys that passed sockets have replaced
    places = Places(lambda key: given[key].where if key in given else str(path), shared)
    problems.extend(_contradictions(specs, values, places, sockets))
    if problems:
        raise ConfigError(problems)
    origins = {key: given[key].origin if key in given else "default" for key in values}
    return Config(values, origins, tuple(warnings), path, sockets, shared)


def changed(old: Config, new: Config, settings: Mapping[str, Setting]) -> tuple[list[str], list[str]]:
    """Returns the keys whose values differ: those that can change while the daemon runs, and those that cannot."""
    keys = [key for key in settings if old.values[key] != new.values[key]]
    return [key for key in keys if settings[key].reload], [key for key in keys if not settings[key].reload]


def merged(old: Config, new: Config, fixed: Iterable[str], specs: Sequence[ProtocolSpec]) -> Config:
    """Returns the new configuration, but with the old values of the keys that cannot change while the daemon runs.

    Raises ConfigError if these values conflict.
    """
    kept = tuple(fixed)
    values = {**new.values, **{key: old.values[key] for key in kept}}
    origins = {**new.origins, **{key: old.origins[key] for key in kept}}
    shared = {key: name for key, name in new.shared.items() if key not in kept}
    shared |= {key: old.shared[key] for key in kept if key in old.shared}
    config = Config(values, origins, new.warnings, new.path, old.sockets, shared)
    if problems := list(_contradictions(specs, values, Places(new.where, new.shared), old.sockets)):
        keys = ", ".join(dict.fromkeys(map(new.name, kept)))
        raise ConfigError(f"{problem} (these keys cannot change until a restart: {keys})" for problem in problems)
    return config


def _lines(path: Path, pipe_timeout: float, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of every line that is neither blank nor a comment."""
    try:
        content = read_file(str(path), FILE_MAX, pipe_timeout)
    except FileError as error:
        raise ConfigError([f"{path}: {error.why}"]) from None
    for number, raw in enumerate(content.split(b"\n"), 1):
        origin = f"{path}:{number}"
        if raw.strip().startswith(b"#"):
            continue  # a comment may have any encoding, as in old files
        try:
            line = raw.decode().strip(BLANKS)
        except UnicodeDecodeError as error:
            problems.append(f"{origin}: byte {raw[error.start]:#04x} at position {error.start + 1} is not UTF-8")
            continue
        if line:
            yield origin, line


def _entries(lines: Iterable[tuple[str, str]], problems: list[str]) -> list[Entry]:
    entries = []
    for origin, line in lines:
        name, equals, text = (part.strip(BLANKS) for part in line.partition("="))
        hidden = line.startswith(tuple(SECRETS))
        if not name or not equals or (hidden and not re.fullmatch(r"[\w.]+", name)):  # name: may contain the secret
            problems.append(f"{origin}: expected key = value, not {'...' if hidden else repr(line)}")
            continue
        if len(text) >= 2 and text[0] == text[-1] == '"':
            text = text[1:-1]
        entries.append(Entry(name, text, origin))
    return entries


def _by_key(entries: Iterable[Entry], names: Mapping[str, str | None], problems: list[str]) -> dict[str, Entry]:
    """Returns the entry of each key. names: all accepted names, with the key that each name means, or None."""
    given: dict[str, Entry] = {}
    for entry in entries:
        if entry.name not in names:
            problems.append(f"{entry.where}: unknown key {entry.name!r}{_hint(entry.name, names)}")
            continue
        key = names[entry.name]
        if key is None:
            continue
        first = given.setdefault(key, entry)
        if first is not entry:
            same = "" if entry.name == first.name else f" as {first.name}"
            problems.append(f"{entry.where}: {entry.name} is set twice, first{same} in {first.where}")
    return given


def _hint(name: str, names: Iterable[str]) -> str:
    """Returns a hint for the message about an unknown key."""
    prefix, _, rest = name.partition(".")
    if prefix == LISTENER and rest in NOT_SHARED:
        return f", because each protocol has its own: set {' or '.join(key for key in names if _is_own(key, rest))}"
    near = difflib.get_close_matches(name, names, n=1)
    shorter = f"{prefix}.{rest.rpartition('_')[2]}"  # NAME.accounting_port: NAME.port
    near += [shorter] * (shorter in names and shorter not in near)
    return f", did you mean {' or '.join(near)}?" if near else ""


def _is_own(key: str, name: str) -> bool:
    protocol, _, rest = key.partition(".")
    return rest == name and protocol != ADMIN


def _values(settings: Mapping[str, Setting], given: Mapping[str, Entry], problems: list[str]) -> dict[str, Any]:
    """Returns every key and its value, except the keys whose text is invalid."""
    values = {key: setting.default for key, setting in settings.items()}
    for key, entry in given.items():
        try:
            values[key] = settings[key].read(entry.text)
        except ValueError as error:
            del values[key]
            unit = settings[key].unit.partition(";")[0]
            unit = f" of {unit}" if unit in TIME_UNITS else ""
            problems.append(f"{entry.where}: {entry.name}: {str(error).replace(WHOLE_NUMBER, WHOLE_NUMBER + unit)}")
    return values


def _share(specs: Sequence[ProtocolSpec], values: dict[str, Any], given: dict[str, Entry]) -> dict[str, str]:
    """Applies values that are set for all listeners to the protocols that do not set these keys.

    Returns, for each such key, the name under which it was set.
    """
    names = {}
    for name in shared_settings():
        entry = given.pop(name, None)
        if entry is None:
            del values[name]
            continue
        keys = [f"{spec.name}{name.removeprefix(LISTENER)}" for spec in specs]
        for key in (key for key in keys if key not in given):
            given[key] = entry
            names[key] = name
            values.pop(key)
            if name in values:
                values[key] = values[name]
        values.pop(name, None)
    return names


def _readable_secrets(path: Path, given: Mapping[str, Entry]) -> Iterator[str]:
    """Yields warnings about secrets in a file that every user can read."""
    for key in sorted(SECRETS & given.keys()):
        text = given[key].text
        has_secret = "@" in text if key == "cluster.url" else bool(text)  # a URL may have no password
        if has_secret and given[key].origin != OVERRIDE and path.stat().st_mode & stat.S_IROTH:
            yield f"{given[key].where}: {key}: every user of this machine can read the file; run chmod o= {path}"


def _weak_token(values: Mapping[str, Any], given: Mapping[str, Entry]) -> Iterator[str]:
    """Yields a warning about a token that can be guessed. Who has it can close connections."""
    token = values.get("admin.token", "")
    if 0 < len(token) < TOKEN_SHORT:
        why = f"one of less than {TOKEN_SHORT} characters can be guessed; run openssl rand -hex 24"
        yield f"{given['admin.token'].where}: admin.token: {why}"


def _set_but_off(specs: Sequence[ProtocolSpec], values: Mapping[str, Any], given: Mapping[str, Entry]) -> Iterator[str]:
    """Yields a warning for each protocol of which a key is set, but which is neither enabled nor disabled."""
    for owner in (*(spec.name for spec in specs), ADMIN):
        switch = f"{owner}.enable"
        if switch in given or values.get(switch, True):
            continue
        entries = (entry for key, entry in given.items() if key.startswith(f"{owner}."))
        entry = next((each for each in entries if each.text and not each.name.startswith(LISTENER)), None)
        if entry is not None:
            yield f"{entry.where}: {entry.name} is set, but {switch} = true is not: {owner} is off"


# ---- sockets that the process was started with ----------------------------------------------------------------------


def _assigned(
    passed: Sequence[Passed],
    specs: Sequence[ProtocolSpec],
    values: dict[str, Any],
    given: dict[str, Entry],
    problems: list[str],
) -> dict[str, tuple[socket.socket, ...]]:
    """Assigns the passed sockets to protocols.

    The addresses of these sockets replace the addresses in the configuration.
    """
    places: dict[str, list[Passed]] = {}
    ports = {port.name: port for spec in specs for port in ports_of(spec)}
    switches = {**{name: f"{port.protocol}.enable" for name, port in ports.items()}, ADMIN: f"{ADMIN}.enable"}
    listening = {name: _addresses(port, values) for name, port in ports.items()}
    listening[ADMIN] = [split_bind(values["admin.bind"])] if "admin.bind" in values else []
    for number, one in enumerate(passed):
        owner = one.name.partition(".")[0]
        if owner not in switches:
            owner = next((name for name in switches if one.address in listening[name]), "")
            one.name = owner  # needed by a reload: the address in the file may be another one by then
        if not owner:
            problems.append(
                f"{PASSED}: socket {number} listens on {shown(*one.address)}, which no protocol is configured for:"
                f" name it with FileDescriptorName={' or '.join(switches)}"
            )
        elif not values.get(switches[owner], True):
            problems.append(f"{PASSED}: a socket was passed for {owner}, but {switches[owner]} is false")
        else:
            places.setdefault(owner, []).append(one)
    for owner, sockets in places.items():
        where = [one.address for one in sockets]
        if owner == ADMIN and len(sockets) > 1:
            problems.append(f"{PASSED}: {len(sockets)} sockets were passed for {ADMIN}, which takes only one")
        found = {"admin.bind": shown(*where[0])} if owner == ADMIN else _found(ports[owner], where, values)
        for key, value in found.items():
            values[key] = value
            given[key] = Entry(key, "", PASSED)
    return {owner: tuple(one.socket for one in sockets) for owner, sockets in places.items()}


def _found(port: Port, where: Sequence[tuple[str, int]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a port's keys that follow from its passed sockets."""
    tcp = [place for place in where if place[1] >= 0]
    found = {
        port.key("port"): tcp[0][1] if tcp else values.get(port.key("port"), 0),
        port.key("socket"): next((path for path, number in where if number < 0), ""),
    }
    if port.name == port.protocol:
        found[port.key("bind")] = tuple(dict.fromkeys(host for host, _ in tcp))
    return found


def _addresses(port: Port, values: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Returns the addresses of a port in the configuration, in the form of Passed.address."""
    number = values.get(port.key("port"), 0)
    tcp = [(host, number) for host in values.get(f"{port.protocol}.bind", ())]
    return [*tcp, (values.get(port.key("socket"), ""), -1)]


# ---- conflicting values ----------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Formats keys for messages.

    where: returns the beginning of a message. shared: the names that differ from their key.
    """

    where: Callable[[str], str]
    shared: Mapping[str, str]

    def of(self, key: str) -> str:
        return f"{self.where(key)}: {self.name(key)}"

    def name(self, key: str) -> str:
        return self.shared.get(key, key)

    def beside(self, key: str, name: str) -> str:
        """Returns another key of the same listener.

        If `key` was set for all listeners, the returned key is also a key for all listeners.
        """
        return f"{self.name(key).partition('.')[0]}.{name}"


def exposed(protocol: str, values: Mapping[str, Any]) -> list[str]:
    """Returns the addresses in `bind` on which clients on other machines could use a protocol without any check."""
    if any(values.get(f"{protocol}.{key}", True) for key in ("insecure", "allow", "tls.cert")):
        return []
    return [address for address in values.get(f"{protocol}.bind", ()) if not ipaddress.ip_address(address).is_loopback]


def _contradictions(
    specs: Sequence[ProtocolSpec], values: Mapping[str, Any], places: Places, passed: Container[str]
) -> Iterator[str]:
    """Yields the conflicts between values.

    A key without a value is ignored, because its mistake was reported already.
    """
    switches = [f"{spec.name}.enable" for spec in specs]
    if all(_is_off(switch, values) for switch in switches):
        yield f"{places.where('')}: no protocol is enabled, set {' or '.join(switches)} = true"
    for spec in specs:
        if values.get(f"{spec.name}.enable"):
            yield from _unheard(spec, values, places, passed)
            yield from _listener_contradictions(spec.name, values, places)
            if spec.shared is not None and values.get(spec.shared.address):
                yield from _redis_mistakes(spec.shared.address, values, places)
            if spec.journal is not None and values.get(spec.journal.path):
                yield from _unfit_for_journal(spec.journal, values, places)
    yield from _collisions(specs, values, places)
    if values.get("admin.enable"):
        yield from _admin_contradictions(values, places.where)
    yield from _cluster_contradictions(specs, values, places)


def _unfit_for_journal(journal: Journal, values: Mapping[str, Any], places: Places) -> Iterator[str]:
    for key, most in journal.most.items():
        if values.get(key, 0) > most:
            yield f"{places.of(key)}: with {journal.path} at most {most} is possible, not {values[key]}"


def _redis_mistakes(key: str, values: Mapping[str, Any], places: Places) -> Iterator[str]:
    yield from _lacks_redis(key, values, places)
    try:
        split_redis(values[key])
    except ValueError as error:
        yield f"{places.of(key)}: {error}"


def _lacks_redis(key: str, values: Mapping[str, Any], places: Places) -> Iterator[str]:
    if values.get(key) and importlib.util.find_spec(SHARED_NEEDS) is None:
        yield f"{places.of(key)} needs the extra redis: in the source tree, run pip install '.[redis]'"


def _cluster_contradictions(specs: Sequence[ProtocolSpec], values: Mapping[str, Any], places: Places) -> Iterator[str]:
    yield from _lacks_redis("cluster.url", values, places)
    for key in ("cluster.credentials", "cluster.ca_file"):
        if values.get(key) and _is_off("cluster.url", values):
            yield f"{places.of(key)} needs cluster.url"
    if values.get("cluster.url"):
        servers = split_servers(values["cluster.url"])
        switches = [f"{spec.name}.enable" for spec in specs if spec.leased_limits is not None]
        if all(_is_off(switch, values) for switch in switches):
            yield f"{places.of('cluster.url')} needs {' or '.join(switches)} = true"
        if values.get("cluster.ca_file") and not servers.is_tls:
            yield f"{places.of('cluster.ca_file')} needs rediss:// in cluster.url"
        if values.get("cluster.credentials") and servers.password:
            yield f"{places.of('cluster.credentials')}: cluster.url has a password too"


def _collisions(specs: Sequence[ProtocolSpec], values: Mapping[str, Any], places: Places) -> Iterator[str]:
    """Yields conflicts between ports that would listen on the same address."""
    taken: dict[tuple[str, int], str] = {}
    for port in (each for spec in specs if values.get(f"{spec.name}.enable") for each in ports_of(spec)):
        key, number = port.key("port"), values.get(port.key("port"), 0)
        for host in values.get(f"{port.protocol}.bind", ()) if number else ():
            before = taken.setdefault((host, number), key)
            if before != key:
                yield f"{places.of(key)}: {shown(host, number)} is already used by {before}"


def _is_off(key: str, values: Mapping[str, Any]) -> bool:
    return key in values and not values[key]


def _unheard(spec: ProtocolSpec, values: Mapping[str, Any], places: Places, passed: Container[str]) -> Iterator[str]:
    """Yields a mistake for each port that has no address. passed: the ports that have passed sockets."""
    bind = f"{spec.name}.bind"
    for port in ports_of(spec):
        socket = port.key("socket")
        if port.name not in passed and _is_off(bind, values) and _is_off(socket, values):
            empty = f"{places.name(bind)} and {socket} are both empty"
            yield f"{places.where(bind)}: {port.name} is enabled but listens nowhere: {empty}"


def _listener_contradictions(name: str, values: Mapping[str, Any], places: Places) -> Iterator[str]:
    bind = f"{name}.bind"
    for address in exposed(name, values):
        cert, allow, insecure = (places.beside(bind, key) for key in ("tls.cert", "allow", "insecure"))
        yield (
            f"{places.of(bind)}: {address} can be reached from other machines by everybody:"
            f" set {cert}, or {allow}, or {insecure} = true if that is intended"
        )
    for one, needed in (
        ("tls.key", "tls.cert"),
        ("tls.client_ca", "tls.cert"),
        ("tls.require_client_cert", "tls.client_ca"),
    ):
        key = f"{name}.{one}"
        if values.get(key) and _is_off(f"{name}.{needed}", values):
            yield f"{places.of(key)} needs {places.beside(key, needed)}"


def _admin_contradictions(values: Mapping[str, Any], where: Callable[[str], str]) -> Iterator[str]:
    if importlib.util.find_spec(ADMIN_NEEDS) is None:
        ways = "in the source tree, run `make setup` or pip install '.[admin]'"
        yield f"{where('admin.enable')}: admin.enable needs the extra admin: {ways}"
    host, port = split_bind(values["admin.bind"]) if "admin.bind" in values else ("", -1)
    allowed = values.get("admin.allow", True) or values.get("admin.insecure", True)
    if port >= 0 and not allowed and not ipaddress.ip_address(host).is_loopback:
        yield (
            f"{where('admin.bind')}: admin.bind: {host} can be reached from other machines by everybody:"
            f" set admin.allow, or admin.insecure = true if that is intended"
        )
