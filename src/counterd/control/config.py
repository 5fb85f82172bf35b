"""The configuration: which settings there are, and their values from one file and the command line.

Floor 4. A file is lines of `key = value`, read to the end before anything is refused: ConfigError has every mistake.
Each message begins with where the key was given. A value that --set replaces is not looked at, so that --set can
also repair a file. Nothing here changes the process: applying values is the business of whoever asked for them.
"""

from __future__ import annotations

import difflib
import grp
import os
import pwd
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import counterd
from counterd.control.log import one_line
from counterd.settings import Reader, Setting, addresses, boolean, choice, integer, octal_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from counterd.protocols import Room

SYSTEM_FILE = Path("/etc/counterd/counterd.conf")
SHIPPED_FILE = Path(counterd.__file__).with_name("counterd.conf")

OVERRIDE = "--set"
BLANKS = " \t\n\r\v\f"

# Limits of the kernel: sun_path with its final NUL, then those of tcp(7) for TCP_KEEPIDLE, _KEEPINTVL and _KEEPCNT.
SOCKET_PATH_MAX = 107
KEEPALIVE_SECONDS_MAX = 32767
KEEPALIVE_COUNT_MAX = 127
TIMEOUT_MAX = 3600
CONNECTIONS_MAX = (1 << 31) - 1


class ConfigError(Exception):
    """Everything that is wrong with a configuration: `problems`, one line each; as text, joined with newlines."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(one_line(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Config:
    """A configuration without mistakes.

    values: every known key and its effective value, parsed by its setting.
    origins: where each value comes from: `FILE:LINE`, `--set` or `default`.
    warnings: what whoever runs this should know, a line each; the caller logs them.
    path: the file that was read.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    path: Path

    def where(self, key: str) -> str:
        """Where the value of a key is from, or would be: for messages."""
        origin = self.origins[key]
        return str(self.path) if origin == "default" else origin


class Entry(NamedTuple):
    """A key with a value, as somebody wrote them."""

    name: str
    text: str
    origin: str

    @property
    def where(self) -> str:
        """What a message about it begins with."""
        return f"{OVERRIDE} {self.name}={self.text}" if self.origin == OVERRIDE else self.origin


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
EVERYWHERE = ("0.0.0.0", "::")


def _yrmcds_bind(values: dict[str, Any], given: dict[str, Entry]) -> str | None:
    """Turns virtual_ip and bind_ip into counter.bind, unless that is given itself; returns a warning or None."""
    listed = tuple(dict.fromkeys(values.pop("virtual_ip", ()) + values.pop("bind_ip", ())))
    if YRMCDS_BIND not in values or YRMCDS_BIND in given:
        return None
    values[YRMCDS_BIND] = listed or EVERYWHERE
    for name in ("bind_ip", "virtual_ip"):
        if name in given:
            given.setdefault(YRMCDS_BIND, given[name])
    if listed:
        if "bind_ip" in given:
            return None
        return f"bind_ip is not set: counter listens on virtual_ip ({' '.join(listed)}) only, yrmcds on all addresses"
    return (
        f"counter listens on ALL addresses ({' '.join(EVERYWHERE)}), as yrmcds does: whoever reaches this machine can"
        f" use it; set {YRMCDS_BIND} or bind_ip"
    )


# ---- settings -------------------------------------------------------------------------------------------------------


def settings_for(rooms: Iterable[Room]) -> dict[str, Setting]:
    """Every setting there is, by key: the daemon's, then for each room those of its listener and its own."""
    settings = (*_daemon(), *(setting for room in rooms for setting in (*_listener(room), *room.settings)))
    return {setting.key: setting for setting in settings}


def _daemon() -> Iterator[Setting]:
    yield Setting("log.level", choice("error", "warning", "info", "debug"), "info", reload=True)
    yield Setting("log.format", choice("text", "json"), "text", reload=True)
    yield Setting("user", _account("user", pwd.getpwnam, pwd.getpwuid), "", "name or number")
    yield Setting("group", _account("group", grp.getgrnam, grp.getgrgid), "", "name or number")
    yield Setting("drain.timeout", integer(0, TIMEOUT_MAX), 10, "seconds", reload=True)


def _listener(room: Room) -> Iterator[Setting]:
    name = room.name
    seconds, timeout = integer(1, KEEPALIVE_SECONDS_MAX), integer(1, TIMEOUT_MAX)
    yield Setting(f"{name}.enable", boolean, False)
    yield Setting(f"{name}.port", integer(0, 65535), room.default_port, "TCP port; 0 is any free one")
    yield Setting(f"{name}.bind", addresses, ("127.0.0.1", "::1"), "IP addresses; none is no TCP")
    yield Setting(f"{name}.socket", _socket_path, "", "absolute path; empty is no Unix socket")
    yield Setting(f"{name}.socket_mode", octal_mode, 0o660, "octal permissions")
    yield Setting(f"{name}.max_connections", integer(0, CONNECTIONS_MAX), 0, "connections; 0 is no limit", reload=True)
    yield Setting(f"{name}.keepalive_idle", seconds, 10, "seconds", reload=True)
    yield Setting(f"{name}.keepalive_interval", seconds, 5, "seconds", reload=True)
    yield Setting(f"{name}.keepalive_count", integer(1, KEEPALIVE_COUNT_MAX), 3, "probes", reload=True)
    yield Setting(f"{name}.user_timeout", timeout, 25, "seconds", reload=True)
    yield Setting(f"{name}.write_timeout", timeout, 25, "seconds", reload=True)


def _account(kind: str, by_name: Callable[[str], object], by_number: Callable[[int], object]) -> Reader:
    """The name or number of a user or group that this machine knows; empty means none."""

    def read(text: str) -> str:
        try:
            if re.fullmatch("[0-9]+", text):
                by_number(int(text))
            elif text:
                by_name(text)
        except (KeyError, ValueError):  # ValueError: a NUL, or more digits than int() takes
            raise ValueError(f"there is no {kind} {text!r} on this machine") from None
        return text

    return read


def _socket_path(text: str) -> str:
    """An absolute path that fits into the address of a Unix socket; empty means none."""
    if text and not text.startswith("/"):
        raise ValueError(f"expected an absolute path, not {text!r}")
    if "\0" in text:
        raise ValueError(f"expected a path without NUL, not {text!r}")
    length = len(os.fsencode(text))
    if length > SOCKET_PATH_MAX:
        raise ValueError(f"the path has {length} bytes, a Unix socket's can have {SOCKET_PATH_MAX}")
    return text


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


def load(path: Path, overrides: Sequence[str], rooms: Sequence[Room]) -> Config:
    """The configuration in a file with the `key=value` of each --set on top of it.

    Raises ConfigError with all mistakes in both.
    """
    problems: list[str] = []
    warnings: list[str] = []
    settings = settings_for(rooms)
    names: dict[str, str | None] = {key: key for key in settings}
    for room in rooms:
        names.update(room.aliases)

    in_file = _entries(_lines(path, problems), problems)
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
    if is_yrmcds and (warning := _yrmcds_bind(values, given)):
        warnings.append(f"{path}: {warning}")
    problems.extend(_contradictions(path, rooms, values, given))
    if problems:
        raise ConfigError(problems)
    origins = {key: given[key].origin if key in given else "default" for key in values}
    return Config(values, origins, tuple(warnings), path)


def changed(old: Config, new: Config, settings: Mapping[str, Setting]) -> tuple[list[str], list[str]]:
    """The keys whose value is another one: those that can change while the daemon runs, and those that cannot."""
    keys = [key for key in settings if old.values[key] != new.values[key]]
    return [key for key in keys if settings[key].reload], [key for key in keys if not settings[key].reload]


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[str, str]]:
    """The origin and text of every line that is neither blank nor a comment."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
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
        if not name or not equals:
            problems.append(f"{origin}: expected key = value, not {line!r}")
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
            near = difflib.get_close_matches(entry.name, names, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            problems.append(f"{entry.where}: unknown key {entry.name!r}{hint}")
            continue
        key = names[entry.name]
        if key is None:
            continue
        first = given.setdefault(key, entry)
        if first is not entry:
            same = "" if entry.name == first.name else f" as {first.name}"
            problems.append(f"{entry.where}: {entry.name} is given twice, first{same} in {first.where}")
    return given


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


def _contradictions(
    path: Path, rooms: Sequence[Room], values: Mapping[str, Any], given: Mapping[str, Entry]
) -> Iterator[str]:
    """Mistakes that no single value has. A key without a value is a mistake already and is no part of another."""

    def off(key: str) -> bool:
        return key in values and not values[key]

    switches = [f"{room.name}.enable" for room in rooms]
    if all(off(switch) for switch in switches):
        yield f"{path}: nothing is enabled, set {' or '.join(switches)} = true"
    for room in rooms:
        bind, socket = f"{room.name}.bind", f"{room.name}.socket"
        if values.get(f"{room.name}.enable") and off(bind) and off(socket):
            yield f"{given[bind].where}: {room.name} is enabled but listens nowhere, {bind} and {socket} are both empty"
