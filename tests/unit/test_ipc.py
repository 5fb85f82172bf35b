"""Frames between the daemon and its admin process."""

from __future__ import annotations

import pytest

from counterd import ipc
from counterd.ipc import Frames, frame

BODIES = [b"{}", b"", b'{"id": 1}', b"x" * 70_000]


@pytest.mark.parametrize("piece", [1, 3, 4, 5, 1000, 1 << 20])
def test_frames_are_parsed_however_they_are_cut(piece: int) -> None:
    stream = b"".join(map(frame, BODIES))
    taken = Frames()
    cut = (stream[start : start + piece] for start in range(0, len(stream), piece))
    assert [body for data in cut for body in taken.feed(data)] == BODIES


def test_bodies_are_parsed_one_at_a_time() -> None:
    """So a caller can pause between two."""
    taken = Frames()
    first = taken.feed(frame(b"1") + frame(b"2"))
    assert next(first) == b"1"
    assert next(first) == b"2"
    assert next(first, None) is None


def test_a_length_is_refused_before_its_body_arrives() -> None:
    taken = Frames(limit=10)
    assert list(taken.feed(frame(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(ValueError, match="a frame of 11 bytes, but at most 10"):
        list(taken.feed(frame(b"x" * 11)[:4]))


def test_a_body_that_is_too_long_is_refused() -> None:
    assert len(frame(b"x" * 10, 10)) == 14
    with pytest.raises(ValueError, match="at most 10"):
        frame(b"x" * 11, 10)
    with pytest.raises(ValueError, match=f"at most {ipc.FRAME_MAX}"):
        frame(bytes(ipc.FRAME_MAX + 1))
