"""The configuration: which settings there are, and their values from one file and the command line.

Floor 4. A file is lines of `key = value`, read to the end before anything is refused: ConfigError has every mistake.
Each message begins with where the key was given. A value that --set replaces is not looked at, so that --set can
also repair a file. `listener.KEY` is the value of that key for each room that has none of its own, wherever the two are
given. Nothing here changes the process: applying values is the business of whoever asked for them.
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
)
from counterd.control.files import FileError, read_file
from counterd.control.log import one_line
from counterd.settings import Setting, addresses, assembled

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from counterd.contract import Room
    from counterd.control.process.systemd import Passed

SYSTEM_FILE = Path("/etc/counterd/counterd.conf")
SHIPPED_FILE = Path(counterd.__file__).with_name("counterd.conf")

FILE_MAX = 1 << 20  # bytes: fifty times the file that is shipped
# For whoever writes to a pipe: `counterd -c <(generate)`. No generator of a few lines takes longer.
PIPE_TIMEOUT_S = 10.0

OVERRIDE = "--set"
PASSED = "LISTEN_FDS"
SECRETS = {setting.key for setting in settings_for(()).values() if setting.secret}
BLANKS = " \t\n\r\v\f"

# What the extra `admin` installs: if this is there, all of it is.
ADMIN_NEEDS = "aiohttp"
SHARED_NEEDS = "redis"


class ConfigError(Exception):
    """Everything that is wrong with a configuration: `problems`, one line each; as text, joined with newlines."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(map(one_line, problems)))  # rooms that share a key share its mistakes
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Config:
    """A configuration without mistakes.

    values: every known key and its effective value, parsed by its setting: to be listed and compared. Whoever needs one
        takes it from process, admin, listener() or own().
    origins: where each value comes from: `FILE:LINE`, `--set` or `default`.
    warnings: what whoever runs this should know, a line each; the caller logs them.
    path: the file that was read.
    sockets: those that the process was started with, by the room they are for, or "admin".
    shared: of the keys whose value was given for all listeners: under which name.
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

    def listener(self, room: str) -> Listener:
        return assembled(Listener, self.values, f"{room}.")

    def own(self, room: Room) -> Any:
        """A room's own settings, an object of its class."""
        return assembled(room.settings, self.values, f"{room.name}.")

    def name(self, key: str) -> str:
        """The name under which a key was given: for messages."""
        return self.shared.get(key, key)

    def place(self, key: str) -> str:
        """What a message about the value of a key begins with."""
        return f"{self.where(key)}: {self.name(key)}"

    def where(self, key: str) -> str:
        """Where the value of a key is from, or would be: for messages."""
        origin = self.origins.get(key, "default")
        return str(self.path) if origin == "default" else origin


class Entry(NamedTuple):
    """A key with a value, as somebody wrote them."""

    name: str
    text: str
    origin: str

    @property
    def where(self) -> str:
        """What a message about it begins with."""
        if self.origin != OVERRIDE:
            return self.origin
        return f"{OVERRIDE} {self.name}={'...' if self.name in SECRETS else self.text}"


# ---- yrmcds: everything that lets a file of the reference be used as it is ------------------------------------------

# Its own keys, which a file is recognised by, and the settings they mean; None for what only its memcache uses.
YRMCDS_NAMES: dict[str, str | None] = {
    "log.threshold": "log.level",
    "virtual_ip": "virtual_ip",
    "bind_ip": "bind_ip",
    "port": None,
    "repl_port": None,
    "max_connections": None,
    "temp_dir": None,
    "log.file": None,
    "buckets": None,
    "max_data_size": None,
    "heap_data_limit": None,
    "repl_buffer_size": None,
    "initial_repl_sleep_delay_usec": None,
    "secure_erase": None,
    "lock_memory": None,
    "memory_limit": None,
    "workers": None,
    "gc_interval": None,
    "slave_timeout": None,
}
YRMCDS_SETTINGS = {key: Setting(key, addresses, ()) for key in ("virtual_ip", "bind_ip")}
YRMCDS_BIND = "counter.bind"
YRMCDS_INSECURE = "counter.insecure"
EVERYWHERE = ("0.0.0.0", "::")


def _yrmcds_bind(values: dict[str, Any], given: dict[str, Entry]) -> Iterator[str]:
    """Turns virtual_ip and bind_ip into counter.bind, unless that is given itself; yields warnings.

    yrmcds serves whoever reaches it, so its files mean counter.insecure = true: a warning, where ours would be refused.
    """
    listed = tuple(dict.fromkeys(values.pop("virtual_ip", ()) + values.pop("bind_ip", ())))
    if YRMCDS_BIND not in values or YRMCDS_BIND in given:
        return
    values[YRMCDS_BIND] = listed or EVERYWHERE
    for name in ("bind_ip", "virtual_ip"):
        if name in given:
            given.setdefault(YRMCDS_BIND, given[name])
    if listed and "bind_ip" not in given:
        yield f"bind_ip is not set: counter listens on virtual_ip ({' '.join(listed)}) only, yrmcds on all addresses"
    if YRMCDS_INSECURE not in given and (open_to := " ".join(exposed("counter", values))):
        values[YRMCDS_INSECURE] = True
        where, ways = open_to, "counter.tls.cert or counter.allow"
        if not listed:
            where, ways = f"ALL addresses ({open_to})", f"{YRMCDS_BIND} or bind_ip, {ways}"
        yield f"counter listens on {where}, as yrmcds does: whoever reaches this machine can use it; set {ways}"


# ---- reading --------------------------------------------------------------------------------------------------------


def find_file(explicit: Path | None) -> Path:
    """The file to read: the one that is asked for, else the system's if there is one, else the one that is shipped."""
    if explicit is not None:
        return explicit
    try:
        SYSTEM_FILE.lstat()
    except FileNotFoundError:
        return SHIPPED_FILE
    except OSError:
        pass  # it may be there: load() says what keeps it from being read
    return SYSTEM_FILE


def load(
    path: Path,
    overrides: Sequence[str],
    rooms: Sequence[Room],
    passed: Sequence[Passed] = (),
    pipe_timeout: float = 0.0,
) -> Config:
    """The configuration in a file with the `key=value` of each --set on top of it.

    passed: sockets that the process was started with; a room that has some is served there and nowhere else.
    pipe_timeout: the file may be a pipe, and then somebody has so many seconds to write it.
    Raises ConfigError with all mistakes in all of these.
    """
    problems: list[str] = []
    warnings: list[str] = []
    settings = settings_for(rooms) | shared_settings()
    names: dict[str, str | None] = {key: key for key in settings}
    for room in rooms:
        names.update(room.aliases)

    in_file = _entries(_lines(path, pipe_timeout, problems), problems)
    is_yrmcds = any(entry.name in YRMCDS_NAMES for entry in in_file)
    if is_yrmcds:
        settings |= YRMCDS_SETTINGS
        names |= YRMCDS_NAMES
        unused = dict.fromkeys(entry.name for entry in in_file if names.get(entry.name, "") is None)
        if unused:
            warnings.append(f"{path} is a file of yrmcds, and these of its keys are not used: {', '.join(unused)}")
    given = _by_key(in_file, names, problems)
    given |= _by_key(_entries(((OVERRIDE, override) for override in overrides), problems), names, problems)

    values = _values(settings, given, problems)
    shared = _share(rooms, values, given)
    if is_yrmcds:
        warnings.extend(f"{path}: {warning}" for warning in _yrmcds_bind(values, given))
    warnings.extend(_readable_secrets(path, given))
    sockets = _assigned(passed, rooms, values, given, problems)
    shared = {
        key: name for key, name in shared.items() if given[key].name == name
    }  # those that nobody passed sockets for
    places = Places(lambda key: given[key].where if key in given else str(path), shared)
    problems.extend(_contradictions(rooms, values, places, sockets))
    if problems:
        raise ConfigError(problems)
    origins = {key: given[key].origin if key in given else "default" for key in values}
    return Config(values, origins, tuple(warnings), path, sockets, shared)


def changed(old: Config, new: Config, settings: Mapping[str, Setting]) -> tuple[list[str], list[str]]:
    """The keys whose value is another one: those that can change while the daemon runs, and those that cannot."""
    keys = [key for key in settings if old.values[key] != new.values[key]]
    return [key for key in keys if settings[key].reload], [key for key in keys if not settings[key].reload]


def merged(old: Config, new: Config, fixed: Iterable[str], rooms: Sequence[Room]) -> Config:
    """The new configuration with the fixed keys as they were; ConfigError if the two do not go together."""
    kept = tuple(fixed)
    values = {**new.values, **{key: old.values[key] for key in kept}}
    origins = {**new.origins, **{key: old.origins[key] for key in kept}}
    shared = {key: name for key, name in new.shared.items() if key not in kept}
    shared |= {key: old.shared[key] for key in kept if key in old.shared}
    config = Config(values, origins, new.warnings, new.path, old.sockets, shared)
    if problems := list(_contradictions(rooms, values, Places(new.where, new.shared), old.sockets)):
        keys = ", ".join(dict.fromkeys(map(new.name, kept)))
        raise ConfigError(f"{problem} (until a restart these stay as they were: {keys})" for problem in problems)
    return config


def _lines(path: Path, pipe_timeout: float, problems: list[str]) -> Iterator[tuple[str, str]]:
    """The origin and text of every line that is neither blank nor a comment."""
    try:
        content = read_file(str(path), FILE_MAX, pipe_timeout)
    except FileError as error:
        raise ConfigError([f"{path}: {error.why}"]) from None
    for number, raw in enumerate(content.split(b"\n"), 1):
        origin = f"{path}:{number}"
        if raw.strip().startswith(b"#"):
            continue  # whatever its encoding: old files have comments in any
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
        if not name or not equals or (hidden and not re.fullmatch(r"[\w.]+", name)):  # the name has part of the secret
            problems.append(f"{origin}: expected key = value, not {'...' if hidden else repr(line)}")
            continue
        if len(text) >= 2 and text[0] == text[-1] == '"':
            text = text[1:-1]
        entries.append(Entry(name, text, origin))
    return entries


def _by_key(entries: Iterable[Entry], names: Mapping[str, str | None], problems: list[str]) -> dict[str, Entry]:
    """The entry of each real key; names are all that are accepted, and the keys they mean or None."""
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
            problems.append(f"{entry.where}: {entry.name} is given twice, first{same} in {first.where}")
    return given


def _hint(name: str, names: Iterable[str]) -> str:
    """What somebody may have meant by a key that there is not."""
    prefix, _, rest = name.partition(".")
    if prefix == LISTENER and rest in NOT_SHARED:
        return f", which is not for all listeners: set {' or '.join(key for key in names if _is_of_room(key, rest))}"
    near = difflib.get_close_matches(name, names, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _is_of_room(key: str, name: str) -> bool:
    room, _, rest = key.partition(".")
    return rest == name and room != ADMIN


def _values(settings: Mapping[str, Setting], given: Mapping[str, Entry], problems: list[str]) -> dict[str, Any]:
    """Every key and its value, without those whose text is a mistake."""
    values = {key: setting.default for key, setting in settings.items()}
    for key, entry in given.items():
        try:
            values[key] = settings[key].read(entry.text)
        except ValueError as error:
            del values[key]
            problems.append(f"{entry.where}: {entry.name}: {error}")
    return values


def _share(rooms: Sequence[Room], values: dict[str, Any], given: dict[str, Entry]) -> dict[str, str]:
    """Makes what is given for all listeners the rooms', where they have nothing of their own; returns names by key."""
    names = {}
    for name in shared_settings():
        entry = given.pop(name, None)
        if entry is None:
            del values[name]
            continue
        keys = [f"{room.name}{name.removeprefix(LISTENER)}" for room in rooms]
        for key in (key for key in keys if key not in given):
            given[key] = entry
            names[key] = name
            values.pop(key)
            if name in values:
                values[key] = values[name]
        values.pop(name, None)
    return names


def _readable_secrets(path: Path, given: Mapping[str, Entry]) -> Iterator[str]:
    """Warnings: what is in the file and not for everybody, although its mode lets everybody read it."""
    for key in sorted(SECRETS & given.keys()):
        if given[key].text and given[key].origin != OVERRIDE and path.stat().st_mode & stat.S_IROTH:
            yield f"{given[key].where}: {key}: every user of this machine can read the file: chmod o= {path}"


# ---- sockets that the process was started with ----------------------------------------------------------------------


def _assigned(
    passed: Sequence[Passed],
    rooms: Sequence[Room],
    values: dict[str, Any],
    given: dict[str, Entry],
    problems: list[str],
) -> dict[str, tuple[socket.socket, ...]]:
    """Whose each socket is; what they listen on takes the place of the addresses in the configuration."""
    places: dict[str, list[Passed]] = {}
    ports = {port.name: port for room in rooms for port in ports_of(room)}
    switches = {**{name: f"{port.room}.enable" for name, port in ports.items()}, ADMIN: f"{ADMIN}.enable"}
    listening = {name: _addresses(port, values) for name, port in ports.items()}
    listening[ADMIN] = [split_bind(values["admin.bind"])] if "admin.bind" in values else []
    for number, one in enumerate(passed):
        owner = one.name.partition(".")[0]
        if owner not in switches:
            owner = next((name for name in switches if one.address in listening[name]), "")
            one.name = owner  # for good: a reload must not lose it for another address in the file
        if not owner:
            problems.append(
                f"{PASSED}: socket {number} listens on {shown(*one.address)}, and nothing here does: name it with"
                f" FileDescriptorName={' or '.join(switches)}"
            )
        elif not values.get(switches[owner], True):
            problems.append(f"{PASSED}: there is a socket for {owner}, but {switches[owner]} is false")
        else:
            places.setdefault(owner, []).append(one)
    for owner, sockets in places.items():
        where = [one.address for one in sockets]
        if owner == ADMIN and len(sockets) > 1:
            problems.append(f"{PASSED}: there are {len(sockets)} sockets for {ADMIN}, which has one address")
        found = {"admin.bind": shown(*where[0])} if owner == ADMIN else _found(ports[owner], where, values)
        for key, value in found.items():
            values[key] = value
            given[key] = Entry(key, "", PASSED)
    return {owner: tuple(one.socket for one in sockets) for owner, sockets in places.items()}


def _found(port: Port, where: Sequence[tuple[str, int]], values: Mapping[str, Any]) -> dict[str, Any]:
    """What sockets that were passed for a port make of its keys."""
    tcp = [place for place in where if place[1] >= 0]
    found = {
        port.key("port"): tcp[0][1] if tcp else values.get(port.key("port"), 0),
        port.key("socket"): next((path for path, number in where if number < 0), ""),
    }
    if port.name == port.room:
        found[port.key("bind")] = tuple(dict.fromkeys(host for host, _ in tcp))
    return found


def _addresses(port: Port, values: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Where the configuration has a port listen, as Passed.address says it."""
    number = values.get(port.key("port"), 0)
    tcp = [(host, number) for host in values.get(f"{port.room}.bind", ())]
    return [*tcp, (values.get(port.key("socket"), ""), -1)]


# ---- values that do not go together ----------------------------------------------------------------------------------


class Places(NamedTuple):
    """What messages say of keys. where: each begins with that; shared: names other than the key."""

    where: Callable[[str], str]
    shared: Mapping[str, str]

    def of(self, key: str) -> str:
        return f"{self.where(key)}: {self.name(key)}"

    def name(self, key: str) -> str:
        return self.shared.get(key, key)

    def beside(self, key: str, name: str) -> str:
        """Another key of a listener, for all listeners if this one is."""
        return f"{self.name(key).partition('.')[0]}.{name}"


def exposed(room: str, values: Mapping[str, Any]) -> list[str]:
    """The addresses of its `bind` on which anybody beyond this machine could use a room."""
    if any(values.get(f"{room}.{key}", True) for key in ("insecure", "allow", "tls.cert")):
        return []
    return [address for address in values.get(f"{room}.bind", ()) if not ipaddress.ip_address(address).is_loopback]


def _contradictions(
    rooms: Sequence[Room], values: Mapping[str, Any], places: Places, passed: Container[str]
) -> Iterator[str]:
    """Mistakes that no single value has. A key without a value is a mistake already and is no part of another."""
    switches = [f"{room.name}.enable" for room in rooms]
    if all(_is_off(switch, values) for switch in switches):
        yield f"{places.where('')}: nothing is enabled, set {' or '.join(switches)} = true"
    for room in rooms:
        if values.get(f"{room.name}.enable"):
            yield from _unheard(room, values, places, passed)
            yield from _listener_contradictions(room.name, values, places)
            key = room.shared.address if room.shared is not None else ""
            if values.get(key) and importlib.util.find_spec(SHARED_NEEDS) is None:
                yield f"{places.of(key)} needs more to be installed: pip install '.[redis]' in the source tree"
    yield from _collisions(rooms, values, places)
    if values.get("admin.enable"):
        yield from _admin_contradictions(values, places.where)


def _collisions(rooms: Sequence[Room], values: Mapping[str, Any], places: Places) -> Iterator[str]:
    """Two ports that would listen at the same address."""
    taken: dict[tuple[str, int], str] = {}
    for port in (each for room in rooms if values.get(f"{room.name}.enable") for each in ports_of(room)):
        key, number = port.key("port"), values.get(port.key("port"), 0)
        for host in values.get(f"{port.room}.bind", ()) if number else ():
            before = taken.setdefault((host, number), key)
            if before != key:
                yield f"{places.of(key)}: {shown(host, number)} is where {before} listens"


def _is_off(key: str, values: Mapping[str, Any]) -> bool:
    return key in values and not values[key]


def _unheard(room: Room, values: Mapping[str, Any], places: Places, passed: Container[str]) -> Iterator[str]:
    """Of each of its ports that nobody can come by. passed: those that there are sockets for."""
    bind = f"{room.name}.bind"
    for port in ports_of(room):
        socket = port.key("socket")
        if port.name not in passed and _is_off(bind, values) and _is_off(socket, values):
            empty = f"{places.name(bind)} and {socket} are both empty"
            yield f"{places.where(bind)}: {port.name} is enabled but listens nowhere, {empty}"


def _listener_contradictions(name: str, values: Mapping[str, Any], places: Places) -> Iterator[str]:
    bind = f"{name}.bind"
    for address in exposed(name, values):
        cert, allow, insecure = (places.beside(bind, key) for key in ("tls.cert", "allow", "insecure"))
        yield (
            f"{places.of(bind)}: {address} can be reached from other machines, by anybody:"
            f" set {cert}, or {allow}, or {insecure} = true if that is meant"
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
        ways = "in the source tree, `make setup` or pip install '.[admin]'"
        yield f"{where('admin.enable')}: admin.enable: it needs more to be installed: {ways}"
    host, port = split_bind(values["admin.bind"]) if "admin.bind" in values else ("", -1)
    allowed = values.get("admin.allow", True) or values.get("admin.insecure", True)
    if port >= 0 and not allowed and not ipaddress.ip_address(host).is_loopback:
        yield (
            f"{where('admin.bind')}: admin.bind: {host} can be reached from other machines, by anybody:"
            f" set admin.allow, or admin.insecure = true if that is meant"
        )
