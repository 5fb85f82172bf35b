"""A protocol made up for tests of the session machine: requests that wait, that are skipped, and that a journal holds up.

W        waits: G to the first that waits; T at its deadline, H if the peer sends nothing more, D when the store drains
N        answers n, and has the next that waits go on without a reply
G        answers g, and ends the wait of the first that waits
E x      answers x
S n ...  n bytes, as an unsigned byte times 100: answers S; B, when they have been discarded, if n > 1
J        answers J when the journal has reached the next position
P n      answers p, and posts n hundred times P to whoever said J last
L n      answers with n long pieces of 200,000 times l, one at a time
X        breaks the framing: answers X, and closes
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from counterd._core cimport DONE, HALF_CLOSED, LATER, PARK, SKIP, Frame, Session, Store, Why

cdef enum:
    PIECE = 200000
    UNIT = 100              # bytes


cdef class WaitingStore(Store):
    """wait_ns: until the deadline of what begins to wait."""

    cdef readonly list waiters      # (deadline, session), the first first
    cdef public int64_t wait_ns
    cdef readonly uint64_t written  # position of the last record for the journal
    cdef public bint fails
    cdef WaitingSession writer

    def __cinit__(self, **_):
        self.waiters = []
        self.wait_ns = 1000

    cdef int64_t due_ns(self) except? -2:
        return self.waiters[0][0] if self.waiters else -1

    cdef int run_due(self) except -1:
        while self.waiters and <int64_t>self.waiters[0][0] <= self.now_ns:
            self.end_first(b"T")
        return 0

    def peek(self):
        """Looks at the region and has not begun a call: a mistake."""
        return self.connections.pool.used

    def begin_drain(self):
        with self:
            while self.waiters:
                self.end_first(b"D")

    cdef int end_first(self, bytes reply) except -1:
        cdef WaitingSession session
        if self.waiters:
            session = self.waiters.pop(0)[1]
            session.resume(reply)
        return 0


cdef class WaitingSession(Session):
    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        cdef size_t total = 1
        frame.data = data
        frame.parse_result = 0
        frame.size = 1
        if data[0] == c"X":
            return -1
        if data[0] in b"ESLP":
            if size < 2:
                return 0
            total = 2
            if data[0] == c"S":
                total += data[1] * UNIT
                if data[1] > 1:
                    frame.parse_result = 1
                    frame.skip = total
                    return SKIP
            if size < total:
                return 0
        frame.size = <uint32_t>total
        return total

    cdef int reply(self, uint8_t byte) except -1:
        self.store.out[self.store.out_size] = byte
        self.store.out_size += 1
        return DONE

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef WaitingStore store = <WaitingStore>self.store
        if store.fails:
            raise ValueError("as it was told")
        if frame.parse_result:
            return self.reply(c"B")
        if frame.data[0] == c"W":
            store.waiters.append((store.now_ns + store.wait_ns, self))
            store.expect(store.now_ns + store.wait_ns)
            return PARK
        if frame.data[0] == c"G" or frame.data[0] == c"N":
            store.end_first(b"G" if frame.data[0] == c"G" else None)
            return self.reply(frame.data[0] + 32)
        if frame.data[0] == c"J":
            store.written += 1
            store.writer = self
            self.hold_back(store.written)
        if frame.data[0] == c"P":
            if not store.writer.can_post(frame.data[1] * UNIT):
                return LATER
            store.writer.post(b"P" * (frame.data[1] * UNIT))
            return self.reply(c"p")
        if frame.data[0] == c"L":
            self.position = frame.data[1]
            return self.produce()
        return self.reply(frame.data[1] if frame.data[0] == c"E" else frame.data[0])

    cdef int produce(self) except -1:
        memset(self.store.out + self.store.out_size, c"l", PIECE)
        self.store.out_size += PIECE
        self.position -= 1
        return DONE

    cdef int end_wait(self, Why why) except -1:
        cdef WaitingStore store = <WaitingStore>self.store
        store.waiters[:] = [waiter for waiter in store.waiters if waiter[1] is not self]
        return self.resume(b"H") if why == HALF_CLOSED else 0
