"""What a setting is: a key, how its text is read, its default and its unit.

Floor 0: plain data. Rooms declare settings, control reads them from files; nothing here knows either.
A reader takes the text of a value and returns it parsed, or raises ValueError with what was expected.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reader = Callable[[str], Any]

SIZE_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Setting:
    """One key of the configuration."""

    key: str
    read: Reader
    default: Any
    unit: str = ""
    reload: bool = False  # can change while the daemon runs
    secret: bool = False  # is shown to nobody


def boolean(text: str) -> bool:
    """`true` or `false`, as the reference spells them."""
    if text not in ("true", "false"):
        raise ValueError(f"expected true or false, not {text!r}")
    return text == "true"


def integer(minimum: int, maximum: int) -> Reader:
    """A decimal integer between the two, both included."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise ValueError(f"expected a whole number, not {text!r}")
        return _in_range(int(text), text, minimum, maximum)

    return read


def size(minimum: int, maximum: int) -> Reader:
    """A number of bytes, with K, M or G for powers of 1,024."""

    def read(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,20})([KMG]?)", text.upper())
        if not match:
            raise ValueError(f"expected a size such as 65536 or 256M, not {text!r}")
        return _in_range(int(match[1]) * SIZE_SUFFIXES[match[2]], text, minimum, maximum)

    return read


def octal_mode(text: str) -> int:
    """File permissions in octal, such as 0660."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError(f"expected permissions in octal such as 0660, not {text!r}")
    return int(text, 8)


def choice(*names: str) -> Reader:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}, not {text!r}")
        return text

    return read


def absolute_path(text: str) -> str:
    """An absolute path; empty means none."""
    if text and not text.startswith("/"):
        raise ValueError(f"expected an absolute path, not {text!r}")
    if "\0" in text:
        raise ValueError(f"expected a path without NUL, not {text!r}")
    return text


def extension_name(text: str) -> str:
    """Something of a Python module, such as package.module:name, or the name of an entry point; empty means none."""
    if text and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*|\w[\w.-]*", text):
        raise ValueError(f"expected package.module:name or the name of an entry point, not {text!r}")
    return text


def addresses(text: str) -> tuple[str, ...]:
    """IP addresses separated by blanks or commas; none at all is allowed."""
    words = text.replace(",", " ").split()
    for word in words:
        try:
            ipaddress.ip_address(word)
        except ValueError:
            raise ValueError(f"expected IP addresses, not {word!r}") from None
    if len(set(words)) != len(words):
        raise ValueError(f"an address is there twice in {text!r}")
    return tuple(words)


def networks(text: str) -> tuple[str, ...]:
    """Networks in CIDR notation and IP addresses, separated by blanks or commas; none at all is allowed."""
    found = []
    for word in text.replace(",", " ").split():
        try:
            if "%" in word:  # who comes is compared without the interface
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
