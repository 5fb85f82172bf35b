"""The beanstalk protocol from the client's side: encoded requests, refused arguments, and replies however they are
cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.errors import ProtocolError
from counterd.ipc import PIECE_MAX
from counterd.protocols.beanstalk import _journal, wire
from counterd.protocols.beanstalk.wire import Parser, Reply, Status

REPLIES = [
    (b"INSERTED 1\r\n", Reply(Status.INSERTED, 1)),
    (b"USING a\r\n", Reply(Status.USING, name=b"a")),
    (b"RESERVED 18446744073709551615 3\r\nabc\r\n", Reply(Status.RESERVED, 2**64 - 1, body=b"abc")),
    (b"FOUND 7 0\r\n\r\n", Reply(Status.FOUND, 7)),
    (b"OK 4\r\n\r\n\r\n\r\n", Reply(Status.OK, body=b"\r\n\r\n")),
    (b"KICKED\r\n", Reply(Status.KICKED)),
    (b"KICKED 5\r\n", Reply(Status.KICKED, 5)),
    (b"BURIED\r\n", Reply(Status.BURIED)),
    (b"BURIED 9\r\n", Reply(Status.BURIED, 9)),
    (b"WATCHING 2\r\n", Reply(Status.WATCHING, 2)),
    (b"JOBS 2\r\n", Reply(Status.JOBS, 2)),
    (b"CLEARED 0\r\n", Reply(Status.CLEARED, 0)),
    (b"LIMITED\r\n", Reply(Status.LIMITED)),
    (b"EXISTS 7\r\n", Reply(Status.EXISTS, 7)),
    *((status.value.encode() + b"\r\n", Reply(status)) for status in (
        Status.DELETED, Status.RELEASED, Status.TOUCHED, Status.PAUSED, Status.NOT_FOUND, Status.NOT_IGNORED,
        Status.TIMED_OUT, Status.DEADLINE_SOON, Status.DRAINING, Status.EXPECTED_CRLF, Status.JOB_TOO_BIG,
        Status.OUT_OF_MEMORY, Status.INTERNAL_ERROR, Status.BAD_FORMAT, Status.UNKNOWN_COMMAND,
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (wire.put(b"a\r\n", 1, 2, 3), b"put 1 2 3 3\r\na\r\n\r\n"),
        (wire.use(b"t"), b"use t\r\n"),
        (wire.reserve(), b"reserve\r\n"),
        (wire.reserve(0), b"reserve-with-timeout 0\r\n"),
        (wire.reserve_job(1), b"reserve-job 1\r\n"),
        (wire.delete(2**64 - 1), b"delete 18446744073709551615\r\n"),
        (wire.release(1, 2, 3), b"release 1 2 3\r\n"),
        (wire.bury(1, 2), b"bury 1 2\r\n"),
        (wire.touch(1), b"touch 1\r\n"),
        (wire.watch(b"t"), b"watch t\r\n"),
        (wire.ignore(b"t"), b"ignore t\r\n"),
        (wire.peek(1), b"peek 1\r\n"),
        (wire.peek_next("buried"), b"peek-buried\r\n"),
        (wire.kick(9), b"kick 9\r\n"),
        (wire.kick_job(9), b"kick-job 9\r\n"),
        (wire.stats(), b"stats\r\n"),
        (wire.stats_job(1), b"stats-job 1\r\n"),
        (wire.stats_tube(b"t"), b"stats-tube t\r\n"),
        (wire.inspect_tube(b"t"), b"inspect-tube t\r\n"),
        (wire.list_tubes(), b"list-tubes\r\n"),
        (wire.list_tube_used(), b"list-tube-used\r\n"),
        (wire.list_tubes_watched(), b"list-tubes-watched\r\n"),
        (wire.pause_tube(b"t", 5), b"pause-tube t 5\r\n"),
        (wire.quit(), b"quit\r\n"),
        (wire.batch_reserve(10, 0), b"batch-reserve 10 0\r\n"),
        (wire.clear_tube(b"t", "buried"), b"clear-tube t buried\r\n"),
        (wire.limit_reserves(b"t", 3, b"dead"), b"limit-reserves t 3 dead\r\n"),
        (wire.put_unique(b"a\r\nb", b"k", 9, priority=1, delay=2, ttr=3), b"put-unique 1 2 3 4 k 9\r\na\r\nb\r\n"),
        (wire.put_limited(b"a", b"n", 2, priority=1, delay=2, ttr=3), b"put-limited 1 2 3 1 n 2\r\na\r\n"),
        (wire.put_limited(b"a", b":db:x:", 2, b"k", 9), b"put-limited 65536 0 60 1 :db:x: 2 k 9\r\na\r\n"),
        (wire.list_jobs(b"t"), b"list-jobs t all 0 100\r\n"),
        (wire.list_jobs(b"t", "ready", 7, 9, b"a\r\nb"), b"search-jobs t ready 7 9 4\r\na\r\nb\r\n"),
    ],
)
def test_requests_byte_for_byte(encoded: bytes, expected: bytes):
    assert encoded == expected


@pytest.mark.parametrize(
    ("encode", "said"),
    [
        (lambda: wire.put(b"", -1), "priority must be from 0 to 4294967295, not -1"),
        (lambda: wire.put(b"", delay=2**32), "delay must be"),
        (lambda: wire.put(b"", ttr=2**32), "ttr must be"),
        (lambda: wire.reserve(2**31), "timeout must be from 0 to 2147483647"),
        (lambda: wire.delete(2**64), "id must be"),
        (lambda: wire.release(1, 2**32), "priority must be"),
        (lambda: wire.kick(-1), "count must be"),
        (lambda: wire.batch_reserve(0, 0), "count must be from 1"),
        (lambda: wire.batch_reserve(1, -1), "timeout must be"),
        (lambda: wire.put_unique(b"", b"k" * 200, 10**9), "the key is too long by 13 bytes"),
        (lambda: wire.put_limited(b"", b"n", 0), "maximum must be from 1 to 4294967295, not 0"),
        (lambda: wire.put_limited(b"", b"n" * 150, 1, b"k" * 60), "the names are too long by 18 bytes"),
        (lambda: wire.put_limited(b"", b"a b", 1), "a tube's name has"),
        (lambda: wire.put_limited(b"", b"a", 1, b"a:b"), "a tube's name has"),
        (lambda: wire.clear_tube(b"t", "reserved"), "state must be ready, delayed, buried or all"),
        (lambda: wire.list_jobs(b"t", "gone"), "state must be ready, reserved, delayed, buried or all"),
        (lambda: wire.list_jobs(b"t", needle=b"x" * 1025), "at most 1024 bytes can be searched for, not 1025"),
        (lambda: wire.peek_next("reserved"), "state must be ready, delayed or buried"),
        (lambda: wire.use(b""), "a tube's name has"),
        (lambda: wire.use(b"-a"), "a tube's name has"),
        (lambda: wire.watch(b"a b"), "a tube's name has"),
        (lambda: wire.ignore(b"a" * 201), "a tube's name has"),
        (lambda: wire.pause_tube(b"t\n", 1), "a tube's name has"),
    ],
)
def test_invalid_arguments_are_refused(encode, said: str):
    with pytest.raises(ValueError, match=said):
        encode()


@pytest.mark.parametrize(("data", "reply"), REPLIES, ids=lambda value: getattr(value, "status", None))
def test_a_reply_byte_by_byte(data: bytes, reply: Reply):
    parser = Parser()
    for position in range(len(data) - 1):
        assert parser.feed(data[position : position + 1]) == []
        assert parser.is_within
    assert parser.feed(data[-1:]) == [reply]
    assert not parser.is_within


@given(st.lists(st.sampled_from(REPLIES)), st.data())
def test_replies_may_be_cut_anywhere(replies: list[tuple[bytes, Reply]], data: st.DataObject):
    stream = b"".join(each for each, _ in replies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    parser = Parser()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[start:end])
    assert found == [reply for _, reply in replies]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HELLO\r\n", "not the beginning of a reply: b'HELLO'"),
        (b"\r\n", "not the beginning of a reply"),
        (b"INSERTED\r\n", "invalid arguments of INSERTED"),
        (b"INSERTED x\r\n", "invalid arguments of INSERTED"),
        (b"INSERTED 1 2\r\n", "invalid arguments of INSERTED"),
        (b"INSERTED -1\r\n", "invalid arguments of INSERTED"),
        (b"INSERTED 18446744073709551616\r\n", "more than 64 bits"),
        (b"DELETED 1\r\n", "invalid arguments of DELETED"),
        (b"USING\r\n", "expected the name of a tube"),
        (b"RESERVED 1 11\r\n", "a body of 11 bytes is longer than 10"),
        (b"RESERVED 1 2\r\nabcd", "RESERVED, 2 bytes, does not end with CRLF"),
        (b"x" * 256, "has no end of line"),
    ],
)
def test_invalid_replies_are_protocol_errors(data: bytes, said: str):
    with pytest.raises(ProtocolError, match=said):
        Parser(body_max=10).feed(data)


def test_lists_and_dictionaries_are_read():
    assert wire.read_list(b"---\n- default\n- a b\n") == [b"default", b"a b"]
    assert wire.read_list(b"---\n") == []
    assert wire.read_dictionary(b'---\nname: "a"\npause: 0\n') == {"name": "a", "pause": "0"}
    jobs = b'---\n- id: 1\n  tube: "a"\n- id: 2\n  tube: "b"\n'
    assert wire.read_jobs(jobs) == [{"id": "1", "tube": "a"}, {"id": "2", "tube": "b"}]
    assert wire.read_jobs(b"---\n") == []
    with pytest.raises(ProtocolError, match="not a list"):
        wire.read_jobs(b"- id: 1\n")
    for wrong in (b"", b"- a\n", b"---\na\n", b"---\n- a"):
        with pytest.raises(ProtocolError, match="not a list"):
            wire.read_list(wrong)
    for wrong in (b"", b"a: b\n", b"---\na\n"):
        with pytest.raises(ProtocolError, match="not a dictionary"):
            wire.read_dictionary(wrong)


def test_the_largest_body_that_a_journal_can_have():
    assert _journal.CONSTANTS["KEPT_BODY_MAX"] == wire.KEPT_BODY_MAX
    job = (1, "t", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, None, 0, None, 0)
    with pytest.raises(ValueError, match="job 1: its id, state or body is impossible"):
        _journal.packed([(*job, bytes(wire.KEPT_BODY_MAX + 1))])
    rows = _journal.CONSTANTS["PIECE_SIZE"] + len(_journal.packed([(*job, b"")])) + 3 * wire.NAME_MAX
    assert rows + wire.KEPT_BODY_MAX < PIECE_MAX
