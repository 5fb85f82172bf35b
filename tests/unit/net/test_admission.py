"""Which connections the limits admit, and the reasons of refusals."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from counterd.net.access import EVERYONE, Access
from counterd.net.admission import Limits, refusal

ADDRESS = bytes([192, 0, 2, 7])
NETWORKS = Access((ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("2001:db8::/32")))
USERS = Access(users=frozenset({7}), groups=frozenset({8}))


def limits(**others: Any) -> Limits:
    return Limits(**{"max_connections": 10, "user_timeout": 25, "write_timeout": 5, **others})


def nobody() -> tuple[int, int, frozenset[int]]:
    raise AssertionError("nobody is to ask which process it is")


def process(user: int, group: int) -> tuple[int, int, frozenset[int]]:
    return 4711, user, frozenset({group})


@pytest.mark.parametrize(
    ("made", "is_open"),
    [
        (limits(), True),
        (limits(idle_timeout=1, requests_per_second=1), True),
        (limits(access=NETWORKS), False),
        (limits(access=USERS), False),
        (limits(max_per_address=1), False),
        (limits(access=Access()), True),
    ],
)
def test_limits_are_open_without_access_lists_and_shares(made: Limits, *, is_open: bool) -> None:
    assert made.is_open is is_open


@pytest.mark.parametrize("address", [None, ADDRESS, bytes(16)])
def test_connections_are_admitted_up_to_max_connections(address: bytes | None) -> None:
    assert limits().access == EVERYONE
    assert refusal(limits(), address, nobody, 9, 9) is None
    full = ("max_connections", "10 connections are open, which is the limit")
    assert refusal(limits(), address, nobody, 10, 0) == full


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (ADDRESS, None),
        (bytes([192, 0, 3, 7]), "192.0.3.7"),
        (ipaddress.ip_address("2001:db8::7").packed, None),
        (ipaddress.ip_address("2001:db9::7").packed, "2001:db9::7"),
    ],
)
def test_only_addresses_in_allow_are_admitted(address: bytes, text: str | None) -> None:
    told = ("allow", f"{text} is not an allowed address") if text else None
    assert refusal(limits(access=NETWORKS), address, nobody, 0, 0) == told
    assert refusal(limits(access=USERS), address, nobody, 0, 0) is None


@pytest.mark.parametrize(("user", "group", "allowed"), [(7, 0, True), (0, 8, True), (8, 7, False)])
def test_only_processes_in_socket_allow_are_admitted(user: int, group: int, *, allowed: bool) -> None:
    told = None if allowed else ("allow", f"user {user} (process 4711) is not in socket_allow")
    assert refusal(limits(access=USERS), None, lambda: process(user, group), 0, 0) == told
    assert refusal(limits(access=NETWORKS), None, nobody, 0, 0) is None


def test_connections_of_an_address_are_limited() -> None:
    shared = limits(max_per_address=2)
    assert refusal(shared, ADDRESS, nobody, 5, 1) is None
    told = ("per_address", "192.0.2.7 has 2 open connections, the limit for one address")
    assert refusal(shared, ADDRESS, nobody, 5, 2) == told
    assert refusal(shared, None, nobody, 5, 5) is None


def test_the_first_reason_is_given() -> None:
    all_at_once = limits(access=USERS, max_per_address=1)
    assert refusal(all_at_once, None, lambda: process(1, 1), 10, 0) == (
        "allow",
        "user 1 (process 4711) is not in socket_allow",
    )
    assert refusal(limits(max_per_address=1), ADDRESS, nobody, 10, 1) == (
        "max_connections",
        "10 connections are open, which is the limit",
    )
