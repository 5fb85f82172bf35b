"""What answers announce is bounded before anybody makes room for it."""

from __future__ import annotations

import pytest

from counterd.control import announced as module
from counterd.control.announced import ELEMENTS_MAX, Announced, NoAnswer

LARGE = b"*%d\r\n" % (ELEMENTS_MAX + 1)


def read(*chunks: bytes) -> None:
    announced = Announced()
    for each in chunks:
        announced.read(each)


@pytest.mark.parametrize(
    "head", [b"", b"*2\r\n", b":1\r\n+OK\r\n-ERR\r\n$-1\r\n*-1\r\n*0\r\n$0\r\n\r\n", b"$2\r\n*9\r\n"]
)
def test_an_array_that_is_too_large(head: bytes) -> None:
    """Wherever it is, and however it is cut."""
    data = head + LARGE
    with pytest.raises(NoAnswer, match=f"^an answer of more than {ELEMENTS_MAX} elements$"):
        read(data)
    with pytest.raises(NoAnswer):
        read(*(data[at : at + 1] for at in range(len(data))))


def test_arrays_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ELEMENTS_MAX", 5)
    answer = b"*3\r\n*2\r\n:1\r\n:2\r\n$1\r\na\r\n+OK\r\n"
    read(answer * 100)
    with pytest.raises(NoAnswer, match="more than 5 elements"):
        read(answer, b"*3\r\n*2\r\n:1\r\n:2\r\n*1\r\n")


def test_what_is_in_a_string_announces_nothing() -> None:
    data = b"*2\r\n$%d\r\n%b\r\n:1\r\n" % (len(LARGE), LARGE)
    read(data)
    read(*(data[at : at + 1] for at in range(len(data))))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b">2\r\n", "something of the type '>'"),
        (b"#f\r\n", "something of the type '#'"),
        (b"HTTP/1.1 400 Bad Request\r\n", "something of the type 'H'"),
        (b"\r\n", r"something of the type '\r'"),
        (b"*x\r\n", "a length that is no number"),
        (b"$\r\n", "a length that is no number"),
        (b"$?\r\n", "a length that is no number"),
    ],
)
def test_what_no_server_sends(data: bytes, says: str) -> None:
    with pytest.raises(NoAnswer) as caught:
        read(data)
    assert str(caught.value) == says
