"""The arguments and the input of `counterctl take`."""

from __future__ import annotations

import pytest

from counterd.cli.ctl.holding import Permits
from counterd.cli.ctl.taking import LINE_MAX, Settling, Units, read_permits, read_units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name", Permits(b"name", 1, 1)),
        ("name=2/10", Permits(b"name", 2, 10)),
        ("a=b=2/10", Permits(b"a=b", 2, 10)),
        ("a=b", Permits(b"a=b", 1, 1)),
        ("a\nb=1/1", Permits(b"a\nb", 1, 1)),
        ("\udcff=1/1", Permits(b"\xff", 1, 1)),
    ],
)
def test_permits_are_read(text: str, expected: Permits) -> None:
    assert read_permits(text) == expected


@pytest.mark.parametrize("text", ["a=0/1", "a=2/1"])
def test_invalid_permits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="AMOUNT must be 1 to MAX"):
        read_permits(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t=500@90000/1m", Units(b"t", 500, 90000, 60.0, 90000)),
        ("t=5@7/1.5s/20", Units(b"t", 5, 7, 1.5, 20)),
        ("t=500", Units(b"t", 500)),
        ("a=b=5", Units(b"a=b", 5)),
        ("a=b=1@2/250ms", Units(b"a=b", 1, 2, 0.25, 2)),
    ],
)
def test_rates_are_read(text: str, expected: Units) -> None:
    assert read_units(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t", "expected NAME="),
        ("t=5/7", "expected NAME="),
        ("t=5@7", "expected NAME="),
        ("t=8@7/1s", "UNITS must be 1 to LIMIT, not 8"),
        ("t=21@7/1s/20", "UNITS must be 1 to BURST, not 21"),
        ("t=0@7/1s", "UNITS must be 1 to LIMIT, not 0"),
        ("t=0", "UNITS must be at least 1, not 0"),
        ("t=5@", "expected NAME="),
        ("t=1@7/1y", "1y"),
    ],
)
def test_invalid_rates_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_units(text)


class Settled:
    """Stands for a Taken, and records what is settled."""

    def __init__(self) -> None:
        self.settled: list[tuple[bytes, int]] = []

    def settle(self, name: bytes, used: int) -> None:
        self.settled.append((name, used))


@pytest.mark.parametrize(
    "pieces",
    [
        [b"t=320\na=b=0\n", b""],
        [b"t=3", b"20\r\n\n", b"a=b=", b"0", b""],
        [b"t=320\na=b=0", b""],
    ],
)
def test_lines_of_input_settle(pieces: list[bytes]) -> None:
    taken = Settled()
    settling = Settling(taken)  # type: ignore[arg-type]
    for piece in pieces:
        settling.feed(piece)
    assert taken.settled == [(b"t", 320), (b"a=b", 0)]


@pytest.mark.parametrize("line", [b"t\n", b"t=-1\n", b"=5\n", b"x" * (LINE_MAX + 1)])
def test_invalid_lines_of_input_are_refused(line: bytes) -> None:
    taken = Settled()
    with pytest.raises(ValueError, match="expected a line NAME=USED, not "):
        Settling(taken).feed(line)  # type: ignore[arg-type]
    assert taken.settled == []
