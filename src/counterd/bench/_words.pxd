# The protocols that a load process speaks: what a request looks like, and what a reply says.
#
# A side, header only. Requests of one kind differ in their name alone (and an opaque, and the token of a permit, where
# there are such), so each kind is a template that is copied and patched. A reply has three answers: bytes taken; 0,
# more are needed (there are less than REPLY_MAX of them yet); -1, it cannot be the reply to that request.
#
# counter     docs/protocols/counter.md and its source, "Counter support"
# throttr     docs/protocols/throttr.md
# redis       RESP2: INCR(BY), DECR(BY), GET, SET, DEL, PING
# memcached   the text protocol: incr, decr, get, set, mn
# sentinel    docs/protocols/sentinel.md: names are numbers of flows, the opaque is the xid
# redis-lua   RESP2: EVALSHA of the scripts of scripts.py, ZREM, PING
# beanstalk   docs/protocols/beanstalk.md: the name is a job's number, at the start of its body, and the token its id
# smockron    docs/protocols/smockron.md: messages are not answered, but the PING behind a batch of them is

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, strlen

from counterd.bench._memory cimport Permit, allocate
from counterd.engine.byteorder cimport (
    bswap64, load_be16, load_be32, load_be64, load_le16, load_le32, load_le64, store_be32, store_be64,
)

cdef enum Protocol:
    COUNTER
    THROTTR
    REDIS
    MEMCACHED
    SENTINEL
    REDIS_LUA
    BEANSTALK
    SMOCKRON

cdef enum Op:               # the first four are the opcodes of the counter protocol
    NOOP
    GET                     # of a number
    ACQUIRE
    RELEASE
    QUERY                   # what a quota is; of redis, a number that has to be there
    UPDATE                  # a quota rises by one
    LOWER                   # and falls again, which is the next update of that connection
    INSERT                  # of a name that is new, for a short time
    PURGE                   # of such a name
    SET                     # a buffer
    FETCH                   # and what is in it
    FILL                    # makes the name exist: SET; of the counter protocol an acquire and a release do that
    CLEAR                   # before that, where an INSERT does it, whatever a load has left there
    FLOW                    # whether a call may pass
    PARAM                   # whether one with that value may
    KEEP                    # a permit is still in use
    COUNTS                  # FLOW, estimated from two counters
    PUT                     # a job
    RESERVE                 # one
    DELETE                  # one that was reserved
    CYCLE                   # whichever of these three comes next on a connection
    FAN                     # the same, where some connections put, and the others wait for jobs
    USE                     # puts go into that tube
    WATCH_TUBE              # and reserves take from it,
    IGNORE                  # and from no other
    ACCOUNT                 # an accounting message; a PONG says that it has been read
    CONTROL                 # one that a control message follows, on the connection that listens
    GREET                   # ZMTP's greeting,
    JOIN                    # the rest of its handshake, of a connection that sends messages,
    MEET                    # and of the one that listens
    LISTEN                  # which then subscribes
    OPS

cdef enum Outcome:
    ANSWERED                # noop, fill
    READ                    # get: value is what is in use
    ABSENT                  # no such name
    GRANTED                 # acquire; flow and param: it may pass
    RELEASED
    REFUSED                 # the limit is reached
    NOT_HELD
    UPDATED                 # update, and its counterpart; keep
    WRITTEN                 # insert, set
    PURGED
    TOO_MANY                # requests, for a namespace
    INSERTED
    RESERVED
    DELETED
    TAKEN                   # account
    DELAYED                 # control: DELAY_UNTIL has come
    FAILED                  # the server says that something is wrong
    OUTCOMES

cdef enum:
    HEADER = 12             # of the counter protocol
    OPAQUE_AT = 8
    REPLY_MAX = 512         # no reply to what is asked here comes near it, but for the buffer that may be in it
    WHOAMI_SIZE = 17        # of its reply, throttr's noop
    XID_AT = 2              # of the sentinel protocol
    DATA_AT = 7
    NUMBER_MAX = 32         # characters of a number with its line's end: 20 digits and some
    MOMENT_DIGITS = 13      # of Unix time in milliseconds, until the year 2286
    GREETING_SIZE = 64      # of ZMTP
    PING_SIZE = 13          # with a context of four bytes; a PONG has no TTL
    PONG_SIZE = 11
    PING_CONTEXT_AT = 9
    PONG_CONTEXT_AT = 7
    CONTROL_FRAMES = 4      # of a control message
    CONTROL_LONGEST = 255   # bytes of a frame of a load's control message


cdef struct Dialect:
    Protocol protocol
    int width               # bytes of throttr's numbers
    uint32_t value_size     # of a buffer


cdef struct Template:
    uint8_t* data
    size_t size
    size_t name_at          # where the name's last digits stand
    int digits              # 0 = it has no such name
    size_t flow_at          # where the number of a flow stands, 0 = nowhere; flows have consecutive ones,
    uint64_t first_flow     # from this on
    size_t token_at         # where a token stands, 0 = nowhere
    bint is_open            # a job's id and the line's end are to follow it
    size_t moment_at        # where the time in milliseconds stands, 0 = nowhere


cdef struct Reply:
    Outcome outcome
    int64_t value           # of READ and GRANTED, where the protocol says it, else -1
    uint64_t token          # of GRANTED, where permits have such: what was asked with, or told; of RESERVED the id
    const uint8_t* body     # of RESERVED, of value_size bytes
    bint goes_on            # it answers the next request as well, and has not been taken


cdef inline int template_make(Template* template, bytes data, bytes name, int digits) except -1:
    """Of a request with that name, the last digits of which are to be written."""
    cdef Py_ssize_t at = data.rfind(name)
    template.size = len(data)
    template.data = <uint8_t*>allocate(len(data), 1)
    memcpy(template.data, PyBytes_AS_STRING(data), len(data))
    if at >= 0:
        template.name_at = at + len(name) - digits
        template.digits = digits
    return 0


cdef inline void name_write(uint8_t* target, uint32_t number, int digits) noexcept nogil:
    """The last digits, 1 to 8, of a number in hexadecimal: each nibble in a byte of its own, all at once."""
    cdef uint64_t spread = number
    cdef uint64_t letters
    spread = ((spread & <uint64_t>0xffff0000) << 16) | (spread & <uint64_t>0xffff)
    spread = ((spread & <uint64_t>0x0000ff000000ff00) << 8) | (spread & <uint64_t>0x000000ff000000ff)
    spread = ((spread & <uint64_t>0x00f000f000f000f0) << 4) | (spread & <uint64_t>0x000f000f000f000f)
    letters = ((spread + <uint64_t>0x0606060606060606) >> 4) & <uint64_t>0x0101010101010101
    spread += <uint64_t>0x3030303030303030 + letters * 39
    spread = bswap64(spread)
    memcpy(target, <uint8_t*>&spread + 8 - digits, digits)


cdef inline uint64_t name_read(const uint8_t* data, size_t digits) noexcept nogil:
    """Of name_write()'s digits; of others some number."""
    cdef uint64_t number = 0
    cdef size_t i
    for i in range(digits):
        number = number << 4 | ((data[i] & 15) + (9 if data[i] > 57 else 0))
    return number


cdef inline size_t id_write(uint8_t* target, uint64_t number) noexcept nogil:
    """In decimal, with the line's end."""
    cdef uint8_t[NUMBER_MAX] digits
    cdef size_t at = NUMBER_MAX - 2
    digits[at], digits[at + 1] = 13, 10
    while True:
        at -= 1
        digits[at] = <uint8_t>(48 + number % 10)
        number //= 10
        if number == 0:
            break
    memcpy(target, digits + at, NUMBER_MAX - at)
    return NUMBER_MAX - at


cdef inline size_t request_write(
    const Template* template, uint8_t* target, Protocol protocol, const Permit* permit, uint32_t opaque
) noexcept nogil:
    memcpy(target, template.data, template.size)
    if template.digits == 8:  # a constant size is written in one go
        name_write(target + template.name_at, permit.name, 8)
    elif template.digits:
        name_write(target + template.name_at, permit.name, template.digits)
    if protocol == COUNTER:
        memcpy(target + OPAQUE_AT, &opaque, 4)
    elif protocol == SMOCKRON:
        return template.size
    elif protocol == SENTINEL:
        store_be32(target + XID_AT, opaque)
        if template.flow_at:
            store_be64(target + template.flow_at, template.first_flow + permit.name)
        elif template.token_at:
            store_be64(target + template.token_at, permit.token)
    elif template.is_open:
        return template.size + id_write(target + template.size, permit.token)
    elif template.token_at:
        name_write(target + template.token_at, <uint32_t>(permit.token >> 32), 8)
        name_write(target + template.token_at + 8, <uint32_t>permit.token, 8)
    return template.size


cdef inline Py_ssize_t reply_read(
    const Dialect* dialect, const uint8_t* data, size_t size, Op op, uint32_t opaque, uint32_t resources, Reply* reply
) noexcept nogil:
    if dialect.protocol == COUNTER:
        return counter_reply(data, size, op, opaque, resources, reply)
    if dialect.protocol == THROTTR:
        return throttr_reply(data, size, op, dialect, reply)
    if dialect.protocol == REDIS:
        return redis_reply(data, size, op, dialect.value_size, reply)
    if dialect.protocol == SENTINEL:
        return sentinel_reply(data, size, op, opaque, reply)
    if dialect.protocol == BEANSTALK:
        return beanstalk_reply(data, size, op, dialect.value_size, reply)
    if dialect.protocol == SMOCKRON:
        return zmtp_reply(data, size, op, opaque, reply)
    if dialect.protocol == REDIS_LUA:
        return script_reply(data, size, op, reply)
    return memcached_reply(data, size, op, reply)


# ---- counter -------------------------------------------------------------------------------------------------------

cdef inline Py_ssize_t counter_reply(
    const uint8_t* data, size_t size, Op op, uint32_t opaque, uint32_t resources, Reply* reply
) noexcept nogil:
    cdef uint32_t body
    if size < HEADER:
        return 0 if data[0] == 0x91 else -1
    if data[0] != 0x91 or data[1] != op or memcmp(data + OPAQUE_AT, &opaque, 4):
        return -1
    body = load_be32(data + 4)
    if body > REPLY_MAX - HEADER:
        return -1
    if size < HEADER + body:
        return 0
    reply.value = -1
    if data[2] == 0:
        if body != (4 if op == ACQUIRE or op == GET else 0):
            return -1
        if body:
            reply.value = load_be32(data + HEADER)
        if op == ACQUIRE and reply.value != resources:
            return -1
        reply.outcome = ANSWERED if op == NOOP else READ if op == GET else GRANTED if op == ACQUIRE else RELEASED
    elif data[2] == 0x01 and (op == GET or op == RELEASE):
        reply.outcome = ABSENT
    elif data[2] == 0x21 and op == ACQUIRE:
        reply.outcome = REFUSED
    elif data[2] == 0x22 and op == RELEASE:
        reply.outcome = NOT_HELD
    else:
        reply.outcome = FAILED
    return HEADER + body


# ---- throttr -------------------------------------------------------------------------------------------------------

cdef inline uint64_t throttr_number(const uint8_t* data, int width) noexcept nogil:
    if width == 2:
        return load_le16(data)
    if width == 1:
        return data[0]
    return load_le32(data) if width == 4 else load_le64(data)


cdef inline Py_ssize_t throttr_reply(
    const uint8_t* data, size_t size, Op op, const Dialect* dialect, Reply* reply
) noexcept nogil:
    """A refusal is a failure: what is asked for was made to exist, or is new. Only what is purged may have expired."""
    cdef size_t whole = 1
    cdef size_t ttl_type = 0
    reply.value = -1
    reply.outcome = WRITTEN
    if data[0] > 1:
        return -1
    if data[0] == 0:
        reply.outcome = ABSENT if op == PURGE or op == CLEAR else FAILED
        return 1
    if op == NOOP:
        reply.outcome = ANSWERED
        whole = WHOAMI_SIZE
    elif op == QUERY:
        reply.outcome = READ
        whole = 2 + 2 * dialect.width
        ttl_type = 1 + dialect.width
    elif op == FETCH:
        reply.outcome = READ
        whole = 2 + 2 * dialect.width
        ttl_type = 1
    elif op == UPDATE or op == LOWER:
        reply.outcome = UPDATED
    elif op == PURGE or op == CLEAR:
        reply.outcome = PURGED
    if size < whole:
        return 0
    if ttl_type and not 1 <= data[ttl_type] <= 6:
        return -1
    if op == QUERY:
        reply.value = <int64_t>throttr_number(data + 1, dialect.width)
    elif op == FETCH:
        if throttr_number(data + 2 + dialect.width, dialect.width) != dialect.value_size:
            return -1
        whole += dialect.value_size
    return whole if size >= whole else 0


# ---- sentinel ------------------------------------------------------------------------------------------------------

cdef inline Py_ssize_t sentinel_reply(
    const uint8_t* data, size_t size, Op op, uint32_t opaque, Reply* reply
) noexcept nogil:
    """No such flow, or no room, is a failure. None of these requests may be told to wait."""
    cdef int8_t status
    cdef size_t told = 8  # bytes of data
    cdef uint8_t kind = 1
    if size < DATA_AT + 1:
        return 0
    if op == ACQUIRE:
        kind = 3
    elif op == RELEASE:
        kind, told = 4, 0
    elif op == KEEP:
        kind, told = 5, 4
    elif op == PARAM:
        kind = 2
    elif op == NOOP:
        kind, told = 0, 0 if data[DATA_AT] else 4
    if load_be16(data) != DATA_AT - 1 + told or load_be32(data + XID_AT) != opaque or data[DATA_AT - 1] != kind:
        return -1
    if size < DATA_AT + 1 + told:
        return 0
    status = <int8_t>data[DATA_AT]
    reply.value = -1
    if status == 0:
        if op == RELEASE:
            return -1
        reply.outcome = ANSWERED if op == NOOP else UPDATED if op == KEEP else GRANTED
        if op == ACQUIRE:
            reply.token = load_be64(data + DATA_AT + 1)
            if reply.token == 0:
                return -1
    elif status == 1 and (op == FLOW or op == PARAM or op == ACQUIRE):
        reply.outcome = REFUSED
    elif status == -2 and (op == FLOW or op == PARAM):
        reply.outcome = TOO_MANY
    elif status == 6 and op == RELEASE:
        reply.outcome = RELEASED
    elif status == 7 and (op == RELEASE or op == KEEP):
        reply.outcome = NOT_HELD
    else:
        reply.outcome = FAILED
    return DATA_AT + 1 + told


# ---- lines of text: redis and memcached ----------------------------------------------------------------------------

cdef inline size_t line_size(const uint8_t* data, size_t size) noexcept nogil:
    """Of the first line with its end, CR LF; 0 = it is not whole."""
    cdef const uint8_t* end = <const uint8_t*>memchr(data, 10, size)
    return 0 if end == NULL else end - data + 1


cdef inline bint begins(const uint8_t* data, size_t size, const char* words) noexcept nogil:
    return size >= strlen(words) and memcmp(data, words, strlen(words)) == 0


cdef inline bint is_complaint(const uint8_t* data, size_t size) noexcept nogil:
    """Of memcached. NOT_FOUND too: what is asked for was made to exist."""
    return begins(data, size, b"ERROR") or begins(data, size, b"CLIENT_ERROR") or begins(
        data, size, b"SERVER_ERROR"
    ) or begins(data, size, b"NOT_FOUND\r\n") or begins(data, size, b"NOT_STORED\r\n")


cdef inline bint number_read(const uint8_t* data, size_t size, int64_t* value) noexcept nogil:
    """Decimal digits up to CR LF, perhaps with a sign before them and, of memcached's decr, spaces behind them."""
    cdef size_t first = 1 if data[0] == 45 else 0
    cdef size_t at = first
    cdef int64_t number = 0
    if size > NUMBER_MAX:
        return False
    while at < size and at < first + 18 and 48 <= data[at] <= 57:
        number = number * 10 + data[at] - 48
        at += 1
    value[0] = -number if first else number
    if at == first:
        return False
    while at < size and data[at] == 32:
        at += 1
    return at + 2 == size and data[at] == 13


cdef inline Py_ssize_t redis_reply(
    const uint8_t* data, size_t size, Op op, uint32_t value_size, Reply* reply
) noexcept nogil:
    cdef size_t line = line_size(data, size)
    if line == 0:
        return 0 if size < REPLY_MAX else -1
    reply.value = -1
    if data[0] == 45:  # -ERR ...
        reply.outcome = FAILED
        return line
    if op == NOOP or op == FILL or op == SET or op == INSERT:
        reply.outcome = WRITTEN if op == SET or op == INSERT else ANSWERED
        return line if data[0] == 43 else -1  # +PONG, +OK
    if op == GET or op == QUERY or op == FETCH:
        return redis_bulk(data, size, line, op, value_size, reply)
    reply.outcome = GRANTED if op == ACQUIRE else RELEASED if op == RELEASE else UPDATED
    if data[0] != 58 or not number_read(data + 1, line - 1, &reply.value):  # :12
        return -1
    if op == PURGE:
        reply.outcome = PURGED if reply.value else ABSENT
    return line


cdef inline Py_ssize_t script_reply(const uint8_t* data, size_t size, Op op, Reply* reply) noexcept nogil:
    """1 = yes, 0 = no."""
    cdef size_t line = line_size(data, size)
    if line == 0:
        return 0 if size < REPLY_MAX else -1
    reply.value = -1
    reply.outcome = FAILED
    if data[0] == 45:  # -NOSCRIPT ...
        return line
    if op == NOOP:
        reply.outcome = ANSWERED
        return line if data[0] == 43 else -1
    if data[0] != 58 or line != 4 or not 48 <= data[1] <= 49:
        return -1
    if data[1] == 49:
        reply.outcome = RELEASED if op == RELEASE else GRANTED
    else:
        reply.outcome = NOT_HELD if op == RELEASE else REFUSED
    return line


cdef inline Py_ssize_t redis_bulk(
    const uint8_t* data, size_t size, size_t line, Op op, uint32_t value_size, Reply* reply
) noexcept nogil:
    """A number, or a buffer of that size; what a load does not have to have made may be absent."""
    cdef int64_t length = 0
    cdef size_t rest
    if data[0] != 36 or not number_read(data + 1, line - 1, &length):  # $2
        return -1
    if length < 0:
        reply.outcome = ABSENT if op == GET else FAILED
        return line
    if length != value_size if op == FETCH else length > 20:
        return -1
    rest = <size_t>length + 2
    if size < line + rest:
        return 0 if size < REPLY_MAX + value_size else -1
    reply.outcome = READ
    if op == FETCH:
        return line + rest if memcmp(data + line + length, b"\r\n", 2) == 0 else -1
    return line + rest if number_read(data + line, rest, &reply.value) else -1


cdef inline Py_ssize_t memcached_reply(const uint8_t* data, size_t size, Op op, Reply* reply) noexcept nogil:
    cdef size_t line = line_size(data, size)
    cdef size_t number
    if line == 0:
        return 0 if size < REPLY_MAX else -1
    reply.value = -1
    reply.outcome = GRANTED if op == ACQUIRE else RELEASED if op == RELEASE else ANSWERED
    if (op == ACQUIRE or op == RELEASE) and number_read(data, line, &reply.value):
        return line
    if op == FILL and begins(data, line, b"STORED\r\n") or op == NOOP and begins(data, line, b"MN\r\n"):
        return line
    if op == GET and begins(data, line, b"END\r\n"):
        reply.outcome = ABSENT
        return line
    if op == GET and begins(data, line, b"VALUE "):
        number = line_size(data + line, size - line)
        if number == 0 or size < line + number + 5:
            return 0 if size < REPLY_MAX else -1
        reply.outcome = READ
        if not number_read(data + line, number, &reply.value) or memcmp(data + line + number, b"END\r\n", 5):
            return -1
        return line + number + 5
    reply.outcome = FAILED
    return line if is_complaint(data, line) else -1


# ---- lines of text with a body: beanstalk --------------------------------------------------------------------------

cdef inline Py_ssize_t beanstalk_reply(
    const uint8_t* data, size_t size, Op op, uint32_t value_size, Reply* reply
) noexcept nogil:
    """A refusal is a failure, and so is a reserve that has waited too long. A job has a body of the load's size."""
    cdef size_t line = line_size(data, size)
    cdef uint64_t length = 0
    cdef size_t at
    if line == 0:
        return 0 if size < REPLY_MAX else -1
    reply.value = -1
    reply.outcome = ANSWERED
    if op == RESERVE and begins(data, line, b"RESERVED "):
        reply.outcome = RESERVED
        at = id_read(data, 9, &reply.token)
        if data[at] != 32 or id_read(data, at + 1, &length) + 2 != line or length != value_size:
            return -1
        if size < line + value_size + 2:
            return 0
        reply.body = data + line
        return line + value_size + 2 if memcmp(data + line + value_size, b"\r\n", 2) == 0 else -1
    if op == PUT and begins(data, line, b"INSERTED "):
        reply.outcome = INSERTED
        return line
    if op == DELETE and begins(data, line, b"DELETED\r\n"):
        reply.outcome = DELETED
        return line
    if (op == USE or op == NOOP) and begins(data, line, b"USING "):
        return line
    if (op == WATCH_TUBE or op == IGNORE) and begins(data, line, b"WATCHING "):
        return line
    reply.outcome = FAILED
    return line if is_refusal(data, line) else -1


cdef inline size_t id_read(const uint8_t* data, size_t at, uint64_t* number) noexcept nogil:
    """Decimal digits from there; returns where they end. What follows a line's last digit ends them."""
    number[0] = 0
    while 48 <= data[at] <= 57:
        number[0] = number[0] * 10 + data[at] - 48
        at += 1
    return at


cdef inline bint is_refusal(const uint8_t* data, size_t size) noexcept nogil:
    """Of beanstalk. NOT_FOUND too: what is asked for is there. BURIED is what a put without room may be answered."""
    return begins(data, size, b"NOT_FOUND\r\n") or begins(data, size, b"TIMED_OUT\r\n") or begins(
        data, size, b"DEADLINE_SOON\r\n"
    ) or begins(data, size, b"OUT_OF_MEMORY\r\n") or begins(data, size, b"INTERNAL_ERROR\r\n") or begins(
        data, size, b"JOB_TOO_BIG\r\n"
    ) or begins(data, size, b"DRAINING\r\n") or begins(data, size, b"BURIED ") or begins(
        data, size, b"EXPECTED_CRLF\r\n"
    ) or begins(data, size, b"BAD_FORMAT\r\n") or begins(data, size, b"UNKNOWN_COMMAND\r\n")


# ---- ZMTP: smockron ------------------------------------------------------------------------------------------------

cdef inline size_t ping_write(uint8_t* target, uint32_t count) noexcept nogil:
    """A PING that asks whether so many requests have been read, all together."""
    memcpy(target, b"\x04\x0b\x04PING\0\0", PING_CONTEXT_AT)
    store_be32(target + PING_CONTEXT_AT, count)
    return PING_SIZE


cdef inline void moment_write(uint8_t* target, int64_t moment_ms) noexcept nogil:
    cdef int i
    for i in range(MOMENT_DIGITS):
        target[MOMENT_DIGITS - 1 - i] = <uint8_t>(48 + moment_ms % 10)
        moment_ms //= 10


cdef inline Py_ssize_t zmtp_reply(
    const uint8_t* data, size_t size, Op op, uint32_t number, Reply* reply
) noexcept nogil:
    """A PONG answers all requests with numbers below its own."""
    cdef uint32_t count
    if op == GREET:
        return greeting_reply(data, size, reply)
    if op == JOIN or op == MEET:
        return handshake_reply(data, size, op, reply)
    if op == CONTROL:  # which is answered elsewhere
        return -1
    if memcmp(data, b"\x04\x09\x04PONG", min(size, <size_t>PONG_CONTEXT_AT)) != 0:
        return -1
    if size < PONG_SIZE:
        return 0
    count = load_be32(data + PONG_CONTEXT_AT)
    if <int32_t>(count - number) <= 0:
        return -1
    reply.value = -1
    reply.outcome = TAKEN if op == ACCOUNT else ANSWERED
    reply.goes_on = count - number > 1
    return 0 if reply.goes_on else PONG_SIZE


cdef inline Py_ssize_t greeting_reply(const uint8_t* data, size_t size, Reply* reply) noexcept nogil:
    reply.value = -1
    reply.outcome = ANSWERED
    if data[0] != 0xff or size > 10 and data[10] < 3:
        return -1
    return GREETING_SIZE if size >= GREETING_SIZE else 0


cdef inline Py_ssize_t handshake_reply(const uint8_t* data, size_t size, Op op, Reply* reply) noexcept nogil:
    """READY, and to who sends messages the subscription to everything. An ERROR is a failure."""
    cdef size_t ready = 2 + data[1] if size > 1 else 0
    reply.value = -1
    reply.outcome = ANSWERED
    if ready == 0 or size < ready:
        return 0
    if begins(data + 2, ready - 2, b"\x05ERROR"):
        reply.outcome = FAILED
        return ready
    if data[0] != 4 or not begins(data + 2, ready - 2, b"\x05READY"):
        return -1
    if op == MEET:
        return ready
    data += ready
    size -= ready
    if size < 2 or size < 2 + data[1]:
        return 0
    size = 2 + data[1]
    return ready + size if begins(data + 2, size - 2, b"\x09SUBSCRIBE") or size == 3 and data[2] == 1 else -1


cdef inline Py_ssize_t control_read(
    const uint8_t* data, size_t size, const Template* asked, size_t name_size, int64_t* number
) noexcept nogil:
    """A control message: as a reply is read. number: of the request, made from that template, that it is about; -1 if
    it is about what others have sent. The connection that listens is sent nothing else."""
    cdef size_t at = 0
    cdef size_t head = name_size - asked.digits
    cdef bint is_delay = False
    cdef int i
    number[0] = -1
    for i in range(CONTROL_FRAMES):
        if size < at + 2:
            return 0
        if data[at] != (i < CONTROL_FRAMES - 1):
            return -1
        if size < at + 2 + data[at + 1]:
            return 0
        if i == 1:
            is_delay = asked.digits and begins(data + at + 2, data[at + 1], b"DELAY_UNTIL")
        if i == 2 and is_delay and data[at + 1] == name_size and (
            memcmp(data + at + 2, asked.data + asked.name_at - head, head) == 0
        ):
            number[0] = <int64_t>name_read(data + at + 2 + head, asked.digits)
        at += 2 + data[at + 1]
    return at
