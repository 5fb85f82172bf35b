"""The smockron protocol without I/O: gets accounting messages of gatekeepers, and sends control messages, over ZMTP.

Floor 2 (ARCHITECTURE.md). Section names are those in docs/protocols/smockron.md. On the first port gatekeepers publish
accounting messages, and this end subscribes. On the second port this end publishes control messages, and gatekeepers
subscribe.

A frame of the session is a greeting, or a message with all its ZMTP frames. Commands may come between these. Only
handshakes and PINGs get a reply.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport DONE, HALF_CLOSED, LATER, PARK, Frame, Session, Why
from counterd.engine.byteorder cimport load_be16, prefetch
from counterd.engine.table cimport index_peek, index_prefetch
from counterd.protocols.smockron._store cimport (
    ACCEPTED, ACCOUNTING, CANCEL, DELAYED, FORGET, HANDSHAKE, MALFORMED, OK, PING, REFUSED, REJECTED, SUBSCRIBE,
    UNKNOWN_DOMAIN, Link, Operation, SmockronStore,
)
from counterd.protocols.smockron._throttles cimport (
    DOMAIN_RULED, IDENTIFIER_MAX, Identifier, Throttles, domain_at, domain_find, domain_is, identifier_at,
    identifier_tag,
)
from counterd.protocols.smockron._wire cimport (
    AHEAD_MAX_MS, COMMAND, COMMAND_MAX, CONTENT, CONTEXT_MAX, FIRST_BROKEN, FRAMES_MAX, GREETING, GREETING_SIZE,
    MAJOR_AT, MINOR_AT, MORE, NOT_ZMTP, PARTS, PARTS_MIN, TOO_LONG, TOO_MANY, VERSION_MAJOR, VERSION_MINOR, WRONG_FLAGS,
    Part, command_is, greeting_check, greeting_write, moment_read, part_equals, part_read, part_write, ready_read,
)

cdef enum:
    ACCOUNTING_PORT = 0
    CONTROL_PORT = 1
    PREFIX_MAX = 256            # bytes of a subscription: those of the longest topic
    TTL_UNIT_NS = 100000000     # the unit of a PING's TTL

cdef int64_t HANDSHAKE_NS = 30000000000     # as in libzmq


cdef class SmockronSession(Session):
    """One connection of the smockron protocol. port: 0 for accounting, 1 for control."""

    cdef uint8_t minor          # version of the peer: 3.minor
    cdef bint greeted
    cdef bint ready             # the handshake is complete
    cdef uint32_t domain        # of the last message, as a cache: most connections use one; 0 = an unknown one

    def __cinit__(self, SmockronStore store not None, int port=0):
        cdef bytes greeting = PyBytes_FromStringAndSize(NULL, GREETING_SIZE)
        greeting_write(<uint8_t*>PyBytes_AS_STRING(greeting))
        store.sessions[self.connection] = <void*>self
        store.await_handshake(self.connection, HANDSHAKE_NS)
        self.post(greeting)  # a peer may wait for it

    def __dealloc__(self):
        if self.connection and self.store is not None:  # the store must not post to it, even before forget()
            (<SmockronStore>self.store).sessions[self.connection] = NULL

    # ---- frames ----

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        """Parses a frame (section "Frames"). The first byte of a greeting is not valid as the flags of a frame."""
        cdef SmockronStore store = <SmockronStore>self.store
        cdef size_t position = 0
        cdef int count = 0, frames = 0, found
        cdef Part part
        cdef Part[PARTS] parts
        frame.data = data
        frame.key = NULL
        frame.key_size = frame.tag = frame.size = 0
        if data[0] == 0xff:
            return self.parse_greeting(data, size, frame)
        while True:
            if position == size:
                return 0
            found = part_read(data + position, size - position, &part)
            if found < 0:
                return broken(frame, WRONG_FLAGS)
            if found == 0:
                return 0
            if part.size > store.message_max or position + part.head + part.size > store.message_max:
                return broken(frame, TOO_LONG)
            position += part.head + <size_t>part.size
            frames += 1
            if frames > FRAMES_MAX:
                return broken(frame, TOO_MANY)
            if position > size:
                return 0
            if part.flags & COMMAND:
                if count == 0:
                    break
                continue
            if count < PARTS:
                parts[count] = part
            count += 1
            if not part.flags & MORE:
                break
        frame.parse_result = CONTENT
        frame.size = <uint32_t>position
        if count >= PARTS_MIN and self.port == ACCOUNTING_PORT:
            self.look_up(frame, parts)
        return position

    cdef Py_ssize_t parse_greeting(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        frame.parse_result = greeting_check(data, size)
        if frame.parse_result >= FIRST_BROKEN:
            return -1
        frame.size = GREETING_SIZE
        return GREETING_SIZE if size >= GREETING_SIZE else 0

    cdef void look_up(self, Frame* frame, const Part* parts) noexcept:
        """Prefetches the slots of an identifier."""
        cdef SmockronStore store = <SmockronStore>self.store
        cdef uint32_t domain = self.domain_of(parts)
        if domain == 0 or parts[2].size > IDENTIFIER_MAX:
            return
        frame.key = parts[2].data
        frame.key_size = <uint32_t>parts[2].size
        frame.tag = identifier_tag(&store.throttles, domain_at(&store.throttles, domain), frame.key, frame.key_size)
        index_prefetch(&store.throttles.identifiers.index, frame.tag)

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef SmockronStore store = <SmockronStore>self.store
        cdef Identifier* identifier
        cdef uint32_t number
        cdef int i
        for i in range(count):
            if frames[i].key != NULL:
                number = index_peek(&store.throttles.identifiers.index, frames[i].tag)
                if number:
                    identifier = identifier_at(&store.throttles, number)
                    prefetch(identifier)
                    prefetch(&identifier.links)

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef SmockronStore store = <SmockronStore>self.store
        cdef int parse_result = frame.parse_result
        if parse_result >= FIRST_BROKEN:
            if parse_result == WRONG_FLAGS and not self.greeted:    # `greeted` was not known when the frame was parsed
                parse_result = NOT_ZMTP
            store.state.broken[parse_result] += 1
            return DONE
        if (frame.parse_result == GREETING) == self.greeted:
            return self.refuse_handshake()
        if frame.parse_result == GREETING:
            self.greeted = True
            # Of a higher version, this end and the peer speak 3.1.
            self.minor = frame.data[MINOR_AT] if frame.data[MAJOR_AT] == VERSION_MAJOR else VERSION_MINOR
            self.send_ready()  # a peer may wait for it
            return DONE
        if frame.key != NULL and not store.can_publish():
            return LATER
        if store.links[self.connection].patience_ns and self.ready:
            store.heard(self.connection)
        return self.take_message(frame)

    cdef int take_message(self, const Frame* frame) except -1:
        """Executes a message, and the commands among its frames."""
        cdef Part[PARTS] parts
        cdef Part part
        cdef size_t position = 0
        cdef int count = 0
        while position < frame.size and not self.broken:
            part_read(frame.data + position, frame.size - position, &part)
            position += part.head + <size_t>part.size
            if part.flags & COMMAND:
                self.take_command(&part)
                continue
            if not self.ready:
                return self.refuse_handshake()
            if count < PARTS:
                parts[count] = part
            count += 1
        if count == 0 or self.broken:
            return DONE
        if self.port == ACCOUNTING_PORT:
            return self.take_accounting(parts, count, frame.tag)
        if count == 1 and parts[0].size and parts[0].data[0] <= 1:  # a subscription as in ZMTP 3.0
            return self.take_subscription(parts[0].data + 1, parts[0].size - 1, parts[0].data[0] == 1)
        return DONE

    # ---- ZMTP ----

    cdef int take_command(self, const Part* part) except -1:
        """Executes a command. Ignores unknown commands. See sections "Handshake", "Subscriptions" and "Heartbeats"."""
        if not self.ready:
            return self.take_ready(part)
        if command_is(part, b"PING", 4) and part.size >= 7:
            return self.take_ping(part.data + 5, <size_t>part.size - 5)
        if self.port == CONTROL_PORT and command_is(part, b"SUBSCRIBE", 9):
            return self.take_subscription(part.data + 10, part.size - 10, True)
        if self.port == CONTROL_PORT and command_is(part, b"CANCEL", 6):
            return self.take_subscription(part.data + 7, part.size - 7, False)
        if command_is(part, b"ERROR", 5):
            self.break_off()
        return DONE

    cdef void send_ready(self) noexcept:
        if self.port == CONTROL_PORT:
            self.reply(b"\x05READY\x0bSocket-Type\0\0\0\x03PUB", 25)
        else:
            self.reply(b"\x05READY\x0bSocket-Type\0\0\0\x03SUB", 25)

    cdef int take_ready(self, const Part* part) except -1:
        """Completes the handshake if the peer's socket type fits the port (section "Handshake")."""
        cdef SmockronStore store = <SmockronStore>self.store
        cdef Link* link = store.links + self.connection
        cdef Part kind
        if not command_is(part, b"READY", 5) or not ready_read(part.data + 6, <size_t>part.size - 6, &kind):
            return self.refuse_handshake()
        if self.port == ACCOUNTING_PORT and not (part_equals(&kind, b"PUB", 3) or part_equals(&kind, b"XPUB", 4)):
            self.reply(b"\x05ERROR\x13Invalid socket type", 26)
            return self.refuse_handshake()
        if self.port == CONTROL_PORT and not (part_equals(&kind, b"SUB", 3) or part_equals(&kind, b"XSUB", 4)):
            self.reply(b"\x05ERROR\x13Invalid socket type", 26)
            return self.refuse_handshake()
        self.ready = True
        link.is_ready = True
        link.patience_ns = 0
        store.heard(self.connection)
        store.count(HANDSHAKE, OK)
        if self.port == CONTROL_PORT:
            return DONE
        if self.minor:
            self.reply(b"\x09SUBSCRIBE", 10)
        else:
            store.out_size += part_write(store.out + store.out_size, 0, b"\x01", 1) - (store.out + store.out_size)
        return DONE

    cdef int refuse_handshake(self) except -1:
        (<SmockronStore>self.store).count(HANDSHAKE, REFUSED)
        self.break_off()
        return DONE

    cdef void reply(self, const char* text, size_t size) noexcept:
        """Appends a command to the output."""
        cdef uint8_t* target = self.store.out + self.store.out_size
        self.store.out_size += part_write(target, COMMAND, text, size) - target

    cdef int take_ping(self, const uint8_t* data, size_t size) except -1:
        """Answers a PING (section "Heartbeats"): the PONG repeats the bytes after the TTL."""
        cdef SmockronStore store = <SmockronStore>self.store
        cdef uint8_t[COMMAND_MAX] pong
        if size - 2 > CONTEXT_MAX:
            store.count(PING, MALFORMED)
            return DONE
        memcpy(pong, b"\x04PONG", 5)
        memcpy(pong + 5, data + 2, size - 2)
        self.reply(<char*>pong, 5 + size - 2)
        store.links[self.connection].patience_ns = <int64_t>load_be16(data) * TTL_UNIT_NS
        store.heard(self.connection)
        store.count(PING, OK)
        return DONE

    cdef int take_subscription(self, const uint8_t* data, uint64_t size, bint begins) except -1:
        """Executes a subscription or its end (section "Subscriptions").

        Ignores a prefix that is longer than any topic, because it would match nothing.
        """
        cdef SmockronStore store = <SmockronStore>self.store
        cdef bytes prefix
        if size > PREFIX_MAX:
            store.count(SUBSCRIBE if begins else CANCEL, MALFORMED)
            return DONE
        prefix = PyBytes_FromStringAndSize(<const char*>data, <Py_ssize_t>size)
        if not begins:
            store.cancel(self.connection, prefix)
            store.count(CANCEL, OK)
        elif store.subscribe(self.connection, prefix):
            store.count(SUBSCRIBE, OK)
        else:
            store.count(SUBSCRIBE, REFUSED)
            self.break_off()
        return DONE

    # ---- accounting ----

    cdef uint32_t domain_of(self, const Part* parts) noexcept:
        """Returns the domain of a topic, which may end with a NUL.

        Returns 0 if the domain has no rule. See section "Accounting".
        """
        cdef const Throttles* throttles = &(<SmockronStore>self.store).throttles
        cdef uint64_t size = parts[0].size
        if size and parts[0].data[size - 1] == 0:
            size -= 1
        if size > 255:
            return 0
        if not self.domain or not domain_is(throttles, self.domain, parts[0].data, <uint32_t>size):
            self.domain = domain_find(throttles, parts[0].data, <uint32_t>size)
        if self.domain and domain_at(throttles, self.domain).record.flags & DOMAIN_RULED:
            return self.domain
        return 0

    cdef int take_accounting(self, const Part* parts, int count, uint32_t tag) except -1:
        """Executes an accounting message (section "Accounting")."""
        cdef SmockronStore store = <SmockronStore>self.store
        cdef uint32_t domain
        cdef uint32_t size
        cdef int64_t moment_ms
        cdef int operation
        cdef bint is_moment
        if count < PARTS_MIN:
            store.count(ACCOUNTING, MALFORMED)
            return DONE
        size = <uint32_t>parts[2].size
        domain = self.domain_of(parts)
        if domain == 0:
            store.count(ACCOUNTING, UNKNOWN_DOMAIN)
            return DONE
        operation = status_of(&parts[1])
        moment_ms = moment_read(&parts[4 if operation == DELAYED else 3])
        is_moment = 0 <= moment_ms <= store.now_ms() + AHEAD_MAX_MS
        if operation < 0 or not is_moment and operation != REJECTED or parts[2].size > IDENTIFIER_MAX:
            store.count(ACCOUNTING if operation < 0 else <Operation>operation, MALFORMED)
        elif operation == REJECTED:
            store.reject(domain, tag, parts[2].data, size)
        elif operation == FORGET:
            store.forget_identifier(domain, tag, parts[2].data, size)
        else:
            store.account(domain, <Operation>operation, tag, parts[2].data, size, moment_ms)
        if store.is_full():
            store.park(self.connection)
            return PARK
        return DONE

    cdef int end_wait(self, Why why) except -1:
        """Implements Session.end_wait. The waiting message was accepted before, and will be decided."""
        (<SmockronStore>self.store).parked.pop(self.connection, None)
        return self.resume(None) if why == HALF_CLOSED else 0


cdef inline int status_of(const Part* part) noexcept:
    """Returns the operation of a status, or -1 if the status is unknown."""
    if part_equals(part, b"ACCEPTED", 8):
        return ACCEPTED
    if part_equals(part, b"DELAYED", 7):
        return DELAYED
    if part_equals(part, b"REJECTED", 8):
        return REJECTED
    return FORGET if part_equals(part, b"FORGET", 6) else -1


cdef inline Py_ssize_t broken(Frame* frame, uint8_t parse_result) noexcept:
    frame.parse_result = parse_result
    return -1


def open_store(*, identifiers, message_max, posted_max, hash_key, now_ns=0):
    """Makes a store. The arguments are those of SmockronStore."""
    return SmockronStore(
        make_session=SmockronSession, identifiers=identifiers, message_max=message_max, posted_max=posted_max,
        hash_key=hash_key, now_ns=now_ns,
    )
