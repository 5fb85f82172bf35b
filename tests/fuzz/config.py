"""Any file and any --set are a configuration, or a ConfigError that says where each mistake is: no other exception.

A configuration that is written, key by key, and read again is the same one. A token is never shown. A reload from
one to another gives a configuration, or a ConfigError, too.

Input: the bytes of a file, and after each NUL one --set."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from counterd.control.config.keys import settings_for
from counterd.control.config.loading import Config, ConfigError, changed, load, merged
from counterd.protocols import find_protocols

PROTOCOLS = find_protocols()
SETTINGS = settings_for(PROTOCOLS)
OVERRIDES_MAX = 4
# Stands for a token: wherever it is shown it was one.
SECRET = "S3CRET"
TOKEN_LINE = re.compile(r"\s*admin\.token[\s=]")

TOKENS = [
    *(key.encode() for key in SETTINGS),
    *(key.encode() for spec in PROTOCOLS if spec.foreign_file for key in spec.foreign_file.keys),
    *(f"{spec.name}.enable = true\n".encode() for spec in PROTOCOLS),
    *(b"127.0.0.1", b"::1", b"0.0.0.0", b"10.0.0.0/8", b"fe80::1%lo", b"unix:/", b"user:root", b"group:0", b"256M"),
    *(b"true", b"false", b"json", b"uint64", b"wait", b"\0", b"#", b'"', b" = ", b"\r\n", b"\xff", b"\xc3\xa9"),
    b"admin.token = " + SECRET.encode(),
]


class File:
    """A file without a name in any directory, whose content is replaced for each input."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("configuration")
        self.path = Path(f"/proc/self/fd/{self.descriptor}")

    def write(self, content: bytes) -> Path:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)
        return self.path


FILE = File()


def read(content: bytes, overrides: list[str]) -> Config | None:
    """The configuration, or None if it has mistakes, whose messages must have a place."""
    path = FILE.write(content)
    try:
        config = load(path, overrides, PROTOCOLS)
    except ConfigError as error:
        check_problems(error, content, overrides)
        return None
    assert config.values.keys() == config.origins.keys() == SETTINGS.keys()
    assert all(isinstance(warning, str) for warning in config.warnings)
    return config


def check_problems(error: ConfigError, content: bytes, overrides: list[str]) -> None:
    lines = os.fsdecode(content).split("\n")
    assert error.problems
    assert str(error) == "\n".join(error.problems)
    for problem in error.problems:
        assert problem.isprintable()
        told = re.match(rf"{re.escape(str(FILE.path))}(?::([0-9]+))?: .|--set.*: .", problem)
        assert told, problem
        assert not told[1] or 1 <= int(told[1]) <= len(lines), problem
        of = [lines[int(told[1]) - 1]] if told[1] else overrides
        assert SECRET not in problem or any(SECRET in line and not TOKEN_LINE.match(line) for line in of), problem


def written(values: dict[str, Any]) -> bytes:
    """The values as a configuration file."""
    return b"".join(f'{key} = "{as_text(key, value)}"\n'.encode() for key, value in values.items())


def as_text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:04o}" if key.endswith(".socket_mode") else str(value)


def one_input(data: bytes) -> None:
    content, *overrides = data.split(b"\0", OVERRIDES_MAX)
    rest = [os.fsdecode(override) for override in overrides]
    plain = read(content, [])
    config = read(content, rest) if rest else plain
    if config is None:
        return
    again = read(written(dict(config.values)), [])
    assert again is not None
    assert again.values == config.values
    if plain is not None and rest:
        live, fixed = changed(plain, config, SETTINGS)
        assert {*live, *fixed} == {key for key in SETTINGS if plain.values[key] != config.values[key]}
        try:
            both = merged(plain, config, fixed, PROTOCOLS)
        except ConfigError as error:
            check_problems(error, content, rest)
        else:
            assert changed(plain, both, SETTINGS) == (live, [])
