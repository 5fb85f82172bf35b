"""The readers of settings: which values they accept, and the messages for those that they refuse."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.settings import (
    Setting,
    absolute_path,
    addresses,
    assembled,
    boolean,
    choice,
    extension_name,
    integer,
    networks,
    octal_mode,
    setting,
    settings_of,
    size,
)

ACCEPTED = [
    (boolean, "true", True),
    (boolean, "false", False),
    (integer(0, 9), "0", 0),
    (integer(0, 9), "9", 9),
    (integer(0, 9), "007", 7),
    (integer(-5, 9), "-5", -5),
    (integer(0, 9), "+3", 3),
    (size(0, 1 << 40), "0", 0),
    (size(0, 1 << 40), "65536", 65536),
    (size(0, 1 << 40), "3K", 3 * 1024),
    (size(0, 1 << 40), "3k", 3 * 1024),
    (size(0, 1 << 40), "256M", 256 * 1024**2),
    (size(0, 1 << 40), "2G", 2 * 1024**3),
    (octal_mode, "0660", 0o660),
    (octal_mode, "660", 0o660),
    (octal_mode, "000", 0),
    (choice("text", "json"), "json", "json"),
    (absolute_path, "", ""),
    (absolute_path, "/etc/x y", "/etc/x y"),
    (extension_name, "", ""),
    (extension_name, "tokens:Service", "tokens:Service"),
    (extension_name, "redis-tokens.v2", "redis-tokens.v2"),
    (extension_name, "our.own._tokens2:make", "our.own._tokens2:make"),
    (addresses, "", ()),
    (addresses, "127.0.0.1", ("127.0.0.1",)),
    (addresses, "::1 127.0.0.1", ("::1", "127.0.0.1")),
    (addresses, " 10.0.0.1,10.0.0.2 , ::\t", ("10.0.0.1", "10.0.0.2", "::")),
    (networks, "", ()),
    (networks, "10.0.0.0/8, ::1 fe80::/10\t0.0.0.0/0", ("10.0.0.0/8", "::1/128", "fe80::/10", "0.0.0.0/0")),
    (networks, "10.0.0.1 10.0.0.1/32", ("10.0.0.1/32",)),
]

REFUSED = [
    (networks, "localhost", "expected networks such as 10.0.0.0/8 or IP addresses, not 'localhost'"),
    (networks, "10.0.0.0/33", "expected networks such as 10.0.0.0/8 or IP addresses, not '10.0.0.0/33'"),
    (networks, "fe80::1%lo", "expected networks such as 10.0.0.0/8 or IP addresses, not 'fe80::1%lo'"),
    (networks, "10.0.0.1/8", "10.0.0.1/8 has bits beyond its prefix, expected 10.0.0.0/8"),
    (boolean, "True", "expected true or false, not 'True'"),
    (boolean, "", "expected true or false, not ''"),
    (boolean, "1", "expected true or false, not '1'"),
    (integer(0, 9), "", "expected a whole number, not ''"),
    (integer(0, 9), "1.5", "expected a whole number, not '1.5'"),
    (integer(0, 9), "1_0", "expected a whole number, not '1_0'"),
    (integer(0, 9), "0x1", "expected a whole number, not '0x1'"),
    (integer(0, 9), "5\n", "expected a whole number, not '5\\n'"),
    (integer(0, 9), "٣", "expected a whole number, not '٣'"),
    (integer(0, 9), "1" * 21, f"expected a whole number, not '{'1' * 21}'"),
    (integer(0, 9), "10", "10 is out of range, expected 0 to 9"),
    (integer(0, 9), "-1", "-1 is out of range, expected 0 to 9"),
    (size(0, 9), "-1", "expected a size such as 65536 or 256M, not '-1'"),
    (size(0, 9), "1T", "expected a size such as 65536 or 256M, not '1T'"),
    (size(0, 9), "1 K", "expected a size such as 65536 or 256M, not '1 K'"),
    (size(0, 9), "K", "expected a size such as 65536 or 256M, not 'K'"),
    (size(0, 9), "1k", "1k is out of range, expected 0 to 9"),
    (size(1, 9), "0", "0 is out of range, expected 1 to 9"),
    (octal_mode, "0o660", "expected permissions in octal such as 0660, not '0o660'"),
    (octal_mode, "680", "expected permissions in octal such as 0660, not '680'"),
    (octal_mode, "66", "expected permissions in octal such as 0660, not '66'"),
    (octal_mode, "4660", "expected permissions in octal such as 0660, not '4660'"),
    (choice("text", "json"), "xml", "expected one of text, json, not 'xml'"),
    (absolute_path, "etc/x", "expected an absolute path, not 'etc/x'"),
    (absolute_path, "/x\0y", "expected a path without NUL, not '/x\\x00y'"),
    *(
        (extension_name, text, f"expected package.module:name or the name of an entry point, not {text!r}")
        for text in (".tokens", "tokens:", ":make", "a..b:c", "a:b.c", "2a:b", "a:b\n", "a b:c", "/a:b")
    ),
    (addresses, "localhost", "expected IP addresses, not 'localhost'"),
    (addresses, "127.0.0.1 127.0.0.256", "expected IP addresses, not '127.0.0.256'"),
    (addresses, "127.0.0.1:80", "expected IP addresses, not '127.0.0.1:80'"),
    (addresses, "::1 ::1", "an address is listed twice in '::1 ::1'"),
]


@pytest.mark.parametrize(("read", "given_text", "value"), ACCEPTED)
def test_accepted_values(read, given_text, value):
    result = read(given_text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(("read", "given_text", "message"), REFUSED)
def test_refused_values(read, given_text, message):
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
        read(given_text)


@given(st.integers(-(10**19), 10**19), st.integers(-(10**19), 10**19), st.integers(-(10**19), 10**19))
def test_an_integer_is_accepted_exactly_within_its_range(number, one, other):
    minimum, maximum = sorted((one, other))
    read = integer(minimum, maximum)
    if minimum <= number <= maximum:
        assert read(str(number)) == number
    else:
        with pytest.raises(ValueError, match="out of range"):
            read(str(number))


@given(
    st.sampled_from([boolean, integer(0, 100), size(0, 100), octal_mode, choice("a", "b"), addresses]),
    st.text(st.characters()),
)
def test_any_text_is_a_value_or_a_value_error_in_one_line(read, given_text):
    message = ""
    try:
        read(given_text)
    except ValueError as error:
        message = str(error)
    assert message.isprintable()


def test_a_setting_is_fixed_while_running_by_default():
    assert not Setting("a.b", boolean, False).reload
    assert Setting("a.b", boolean, False).unit == ""


# ---- classes of settings --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    lock: bool = setting(boolean, False, reload=True)
    code: str = setting(choice("a", "b"), "a", "letter", secret=True)


@dataclass(frozen=True)
class House:
    rooms: int = setting(integer(1, 9), 3, "rooms")
    door: Door = field(default_factory=Door)


def test_each_field_of_a_class_is_a_setting() -> None:
    rooms, lock, code = settings_of(House, "house.")
    assert (rooms.key, rooms.default, rooms.unit, rooms.reload, rooms.secret) == (
        *("house.rooms", 3, "rooms"),
        *(False, False),
    )
    assert (lock.key, lock.reload, lock.read("true")) == ("house.door.lock", True, True)
    assert (code.key, code.secret, code.default) == ("house.door.code", True, "a")
    assert [one.key for one in settings_of(House)] == ["rooms", "door.lock", "door.code"]


def test_an_object_is_assembled_from_values_by_key() -> None:
    values = {"house.rooms": 5, "house.door.lock": True, "house.door.code": "b", "other": 1}
    house = assembled(House, values, "house.")
    assert house == House(5, Door(True, "b"))
    assert House() == House(3, Door(False, "a"))
    with pytest.raises(FrozenInstanceError):
        house.rooms = 6
    with pytest.raises(KeyError):
        assembled(House, {}, "house.")
