"""A setting has a key, a reader, a default and a unit. Settings are fields of dataclasses.

Floor 0 (ARCHITECTURE.md): plain data. Protocols declare settings, and `control` reads their values from files. This
module depends on neither. A reader parses the text of a value, or raises a ValueError that says which values are valid.
Code takes a value from an object of such a dataclass, so that a type checker knows each key.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import PurePath
from typing import Any, TypeVar

Reader = Callable[[str], Any]

T = TypeVar("T")

SOCKET_PATH_MAX = 107  # bytes of the kernel's sun_path, without the final NUL
REDIS_EXPECTED = "expected redis://HOST:PORT/DATABASE, rediss://USER:PASSWORD@HOST or unix:///PATH?db=N"
WHOLE_NUMBER = "expected a whole number"
SIZE_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Setting:
    """One key of the configuration."""

    key: str
    read: Reader
    default: Any
    unit: str = ""
    reload: bool = False  # whether a reload applies a new value
    secret: bool = False  # whether the value must never be shown


def setting(read: Reader, default: Any, unit: str = "", *, reload: bool = False, secret: bool = False) -> Any:
    """Declares a field of a frozen dataclass as a setting: `port: int = setting(integer(0, 65535), 80, "TCP port")`."""
    return field(default=default, metadata={"setting": Setting("", read, default, unit, reload, secret)})


def settings_of(kind: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Yields the settings of a class in field order, with the prefix before each key.

    If the default_factory of a field is another such class, that class's settings follow: the field `tls` with the
    setting `cert` becomes `tls.cert`.
    """
    for one in fields(kind):
        key = prefix + one.name
        if "setting" in one.metadata:
            yield replace(one.metadata["setting"], key=key)
        else:
            yield from settings_of(_inner(one), f"{key}.")


def assembled(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Makes an object of a class of settings from the values of all keys."""
    found = {}
    for one in fields(kind):  # type: ignore[arg-type] # kind is a dataclass, but no annotation can express that
        key = prefix + one.name
        found[one.name] = values[key] if "setting" in one.metadata else assembled(_inner(one), values, f"{key}.")
    return kind(**found)


def _inner(one: Field[Any]) -> type[Any]:
    assert isinstance(one.default_factory, type), f"{one.name} is neither a setting nor a class of settings"
    return one.default_factory


def boolean(text: str) -> bool:
    """Reads `true` or `false`."""
    if text not in ("true", "false"):
        raise ValueError(f"expected true or false, not {text!r}")
    return text == "true"


def integer(minimum: int, maximum: int) -> Reader:
    """Reads a decimal integer from minimum to maximum, both included."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise ValueError(f"{WHOLE_NUMBER}, not {text!r}")
        return _in_range(int(text), text, minimum, maximum)

    return read


def size(minimum: int, maximum: int) -> Reader:
    """Reads a number of bytes, with K, M or G for powers of 1,024."""

    def read(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,20})([KMG]?)", text.upper())
        if not match:
            raise ValueError(f"expected a size such as 65536 or 256M, not {text!r}")
        return _in_range(int(match[1]) * SIZE_SUFFIXES[match[2]], text, minimum, maximum)

    return read


def octal_mode(text: str) -> int:
    """Reads file permissions in octal, such as 0660."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError(f"expected permissions in octal such as 0660, not {text!r}")
    return int(text, 8)


def choice(*names: str) -> Reader:
    """Reads one of these words."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}, not {text!r}")
        return text

    return read


def absolute_path(text: str) -> str:
    """Reads an absolute path. An empty text means no path."""
    if text and not text.startswith("/"):
        raise ValueError(f"expected an absolute path, not {text!r}")
    if "\0" in text:
        raise ValueError(f"expected a path without NUL, not {text!r}")
    return text


def socket_path(text: str) -> str:
    """Reads an absolute path that is short enough for the address of a Unix socket. An empty text means no path."""
    length = len(os.fsencode(absolute_path(text)))
    if length > SOCKET_PATH_MAX:
        raise ValueError(f"the path has {length} bytes; the path of a Unix socket can have {SOCKET_PATH_MAX}")
    if text and not PurePath(text).name:
        raise ValueError(f"expected the path of a Unix socket, not the folder {text}")
    return text


def redis_url(text: str) -> str:
    """Reads the URL of a Redis, of which `control` reads the parts.

    An empty text means no Redis. Error messages do not contain the URL, because it may contain a password.
    """
    if text and not re.fullmatch(r"(rediss?|unix)://[!-~]+", text):
        raise ValueError(REDIS_EXPECTED)
    return text


def extension_name(text: str) -> str:
    """Reads package.module:name or the name of an entry point. An empty text means no extension."""
    if text and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*|\w[\w.-]*", text):
        raise ValueError(f"expected package.module:name or the name of an entry point, not {text!r}")
    return text


def addresses(text: str) -> tuple[str, ...]:
    """Reads IP addresses separated by blanks or commas. The list can be empty."""
    words = text.replace(",", " ").split()
    for word in words:
        try:
            ipaddress.ip_address(word)
        except ValueError:
            raise ValueError(f"expected IP addresses, not {word!r}") from None
    if len(set(words)) != len(words):
        raise ValueError(f"an address is listed twice in {text!r}")
    return tuple(words)


def networks(text: str) -> tuple[str, ...]:
    """Reads networks in CIDR notation and IP addresses, separated by blanks or commas. The list can be empty."""
    found = []
    for word in text.replace(",", " ").split():
        try:
            if "%" in word:  # an interface; peer addresses are compared without it
                raise ValueError
            network = ipaddress.ip_network(word, strict=False)
        except ValueError:
            raise ValueError(f"expected networks such as 10.0.0.0/8 or IP addresses, not {word!r}") from None
        if str(network.network_address) != str(ipaddress.ip_address(word.partition("/")[0])):
            raise ValueError(f"{word} has bits beyond its prefix, expected {network}")
        found.append(str(network))
    return tuple(dict.fromkeys(found))


def _in_range(number: int, text: str, minimum: int, maximum: int) -> int:
    if not minimum <= number <= maximum:
        raise ValueError(f"{text} is out of range, expected {minimum} to {maximum}")
    return number
