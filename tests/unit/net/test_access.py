"""Which addresses, users and groups may connect."""

from __future__ import annotations

import ipaddress

import pytest

from counterd.net.access import EVERYONE, Access


def of(*networks: str) -> Access:
    return Access(tuple(map(ipaddress.ip_network, networks)))


def packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("10.0.0.0", True),
        ("10.255.255.255", True),
        ("11.0.0.0", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("2001:db8::1", True),
        ("2001:db9::", False),
        ("::1", True),
        ("::10.0.0.1", False),
        ("::2", False),
    ],
)
def test_addresses_in_the_networks_are_allowed(address: str, allowed: bool) -> None:
    access = of("10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "::1")
    assert access.allows_address(packed(address)) is allowed


@pytest.mark.parametrize(("network", "other"), [("0.0.0.0/0", "::1"), ("::/0", "127.0.0.1")])
def test_the_widest_network_of_one_family_has_no_address_of_the_other(network: str, other: str) -> None:
    assert of(network).allows_address(packed("1.2.3.4")) is (network != "::/0")
    assert not of(network).allows_address(packed(other))


def test_without_networks_every_address_may_connect() -> None:
    assert EVERYONE.allows_address(packed("203.0.113.9"))
    assert Access(users=frozenset({1})).allows_address(packed("::1"))


@pytest.mark.parametrize(
    ("users", "groups", "allowed"),
    [((), (), True), ((7,), (), True), ((8,), (), False), ((), (20,), True), ((8,), (21,), True), ((8,), (22,), False)],
)
def test_a_process_is_known_by_its_user_or_by_one_of_its_groups(
    users: tuple[int, ...], groups: tuple[int, ...], allowed: bool
) -> None:
    access = Access(users=frozenset(users), groups=frozenset(groups))
    assert access.allows_process(7, {20, 21}) is allowed


def test_networks_do_not_limit_processes() -> None:
    assert of("10.0.0.0/8").allows_process(7, ())
