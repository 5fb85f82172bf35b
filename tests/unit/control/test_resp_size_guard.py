"""Sizes that a Redis server announces are bounded before memory is reserved for them."""

from __future__ import annotations

import pytest

from counterd.control.resp_size_guard import DEPTH_MAX, LARGEST, LINE_MAX, Bounds, InvalidReply, RespSizeGuard

LARGE = b"*%d\r\n" % (LARGEST.elements + 1)


def read(*chunks: bytes, most: Bounds = LARGEST) -> None:
    guard = RespSizeGuard(most)
    for each in chunks:
        guard.read(each)


@pytest.mark.parametrize(
    "head", [b"", b"*2\r\n", b":1\r\n+OK\r\n-ERR\r\n$-1\r\n*-1\r\n*0\r\n$0\r\n\r\n", b"$2\r\n*9\r\n"]
)
def test_an_array_that_is_too_large_is_refused(head: bytes) -> None:
    """Wherever it is, and however it is cut."""
    data = head + LARGE
    with pytest.raises(InvalidReply, match=f"^more than {LARGEST.elements:,} elements$"):
        read(data)
    with pytest.raises(InvalidReply):
        read(*(data[at : at + 1] for at in range(len(data))))


def cut(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def test_arrays_that_are_too_large_together_are_refused() -> None:
    most = Bounds(1000, 5)
    answer = b"*3\r\n*2\r\n:1\r\n:2\r\n$1\r\na\r\n+OK\r\n"
    read(answer * 100, most=most)
    with pytest.raises(InvalidReply, match="more than 5 elements"):
        read(answer, b"*3\r\n*2\r\n:1\r\n:2\r\n*1\r\n", most=most)


@pytest.mark.parametrize("answer", [b"$93\r\n" + b"a" * 93 + b"\r\n", b"*2\r\n$3\r\nabc\r\n+" + b"x" * 84 + b"\r\n"])
def test_an_answer_of_too_many_bytes_is_refused(answer: bytes) -> None:
    """However it is cut. Answers before it do not count."""
    for chunks in ([answer * 3], cut(answer * 3)):
        read(*chunks, most=Bounds(len(answer), 5))
        with pytest.raises(InvalidReply, match=f"^more than {len(answer) - 1} bytes$"):
            read(b":1\r\n" * 100, *chunks, most=Bounds(len(answer) - 1, 5))


def test_a_long_string_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(InvalidReply, match=r"^more than 16777216 bytes$"):
        read(b"$536870912\r\n")


@pytest.mark.parametrize("kind", [b"+", b"-", b":", b"*", b"$", b">"])
def test_a_line_without_an_end_is_refused(kind: bytes) -> None:
    line = kind + b"9" * (LINE_MAX - 1)
    for chunks in ([line], cut(line), [line * 100], [b"+OK\r\n" + line]):
        with pytest.raises(InvalidReply, match=f"^a line of more than {LINE_MAX} bytes$"):
            read(*chunks)
    read(line[:-1])
    read(b"-" + b"x" * (LINE_MAX - 3) + b"\r\n")


def test_nested_arrays_are_counted() -> None:
    """The elements that come after a complete array are not in it."""
    deep = b"*1\r\n" * (DEPTH_MAX - 1) + b"*2\r\n:1\r\n*0\r\n"
    read(deep * 3)
    read(*cut(b"*3\r\n" + b"*1\r\n*1\r\n:1\r\n" * 3))
    for chunks in ([b"*1\r\n" * 200_000], cut(b"*1\r\n" + deep)):
        with pytest.raises(InvalidReply, match=f"^more than {DEPTH_MAX} arrays in each other$"):
            read(*chunks)


def test_the_content_of_a_string_is_not_parsed() -> None:
    data = b"*2\r\n$%d\r\n%b\r\n:1\r\n" % (len(LARGE), LARGE)
    read(data)
    read(*(data[at : at + 1] for at in range(len(data))))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b">2\r\n", "the unknown type '>'"),
        (b"#f\r\n", "the unknown type '#'"),
        (b"HTTP/1.1 400 Bad Request\r\n", "the unknown type 'H'"),
        (b"\r\n", r"the unknown type '\r'"),
        (b"*x\r\n", "a length that is not a number"),
        (b"$\r\n", "a length that is not a number"),
        (b"$?\r\n", "a length that is not a number"),
    ],
)
def test_invalid_replies_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidReply) as caught:
        read(data)
    assert str(caught.value) == says
