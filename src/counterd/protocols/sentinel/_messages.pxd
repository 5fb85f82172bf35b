# The wire of the sentinel protocol: decodes requests and encodes replies.
#
# Floor 2, header only. docs/protocols/sentinel.md, "On the wire". The decision about a request, by the engine or an
# extension, is an Answer.

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport Frame
from counterd.engine.byteorder cimport load_be32, load_be64, store_be16, store_be32, store_be64

cdef enum:
    LENGTH_SIZE = 2
    HEAD_SIZE = 7               # of a request: length, xid, type
    FRAME_MAX = 1024            # bytes of a request, including its length
    NAMESPACE_MAX = 1013        # bytes that fit into a PING of FRAME_MAX
    ID_SIZE = 8                 # bytes of the id of a flow or token
    PARAM_HEAD = 16             # bytes of flow, count, and the number of values
    VALUES_MIN = 2              # bytes of the shortest value
    VALUE_SIZE_MAX = 1024       # bytes of a value: a frame's are a bound
    REPLY_HEAD = 8              # bytes of length, xid, type and status
    REPLY_SIZE = 16             # bytes of the longest reply

cdef enum MessageType:
    PING = 0
    FLOW = 1
    PARAM = 2
    ACQUIRE = 3
    RELEASE = 4
    KEEP = 5
    TYPES = 6

# On the wire these are signed bytes.
cdef enum Status:
    BAD_REQUEST = -4
    TOO_MANY_REQUESTS = -2
    FAIL = -1
    OK = 0
    BLOCKED = 1
    SHOULD_WAIT = 2
    NO_RULE = 3
    NOT_AVAILABLE = 5
    RELEASE_OK = 6
    ALREADY_RELEASED = 7

cdef enum:
    STATUS_MIN = -4
    STATUSES = 12               # from STATUS_MIN on

# Of values; section "PARAM".
cdef enum Tag:
    DOUBLE = 3
    FLOAT = 4
    BOOLEAN = 6
    STRING = 7
    TAGS = 8

# Bytes of a value by tag, including the tag; for a string, without its text.
cdef extern from *:
    """
    static const unsigned char counterd_value_sizes[8] = {5, 9, 2, 9, 5, 3, 2, 5};
    static const unsigned char counterd_body_min[6] = {0, 12, 16, 12, 8, 8};
    """
    const uint8_t* VALUE_SIZES "counterd_value_sizes"
    const uint8_t* BODY_MIN "counterd_body_min"     # bytes of each type's body without its optional end


cdef struct Request:
    uint8_t type                # as received: the reply echoes it
    uint8_t kind                # the same, or TYPES for an unknown type
    uint8_t prioritized         # FLOW, ACQUIRE
    uint32_t xid
    uint32_t tag                # of the id, in the tables
    uint32_t count              # FLOW, PARAM, ACQUIRE
    uint32_t values             # PARAM
    uint32_t size               # of data
    const uint8_t* id           # of a flow or token: its name in the tables
    const uint8_t* data         # PING: the namespace; PARAM: the values


cdef struct Answer:             # a field that its type or status does not have is 0
    int status
    int32_t remaining           # FLOW, PARAM
    int32_t wait_ms             # FLOW, PARAM
    int64_t value               # PING: connections; ACQUIRE: the token; KEEP: ms of the lease
    int64_t due_ns              # when the first timer that the request armed is due; INT64_MAX if it armed none


cdef inline Answer answer_of(int status) noexcept nogil:
    """Returns an answer that has only a status."""
    return Answer(status, 0, 0, 0, INT64_MAX)


# ---- values of parameters -------------------------------------------------------------------------------------------

cdef inline uint32_t value_size(const uint8_t* data, uint32_t left) noexcept nogil:
    """Returns the size of the value at `data`, including its tag.

    Returns 0 if the value is invalid. left: bytes of input.
    """
    cdef uint32_t size
    if left == 0 or data[0] >= TAGS:
        return 0
    size = VALUE_SIZES[data[0]]
    if left < size:
        return 0
    if data[0] == STRING:
        if load_be32(data + 1) > left - size:
            return 0
        size += load_be32(data + 1)
    return size


cdef inline void value_unify(uint8_t* value) noexcept nogil:
    """Makes values identical that are equal in Java: all booleans that are true, and all NaNs."""
    if value[0] == BOOLEAN:
        value[1] = value[1] != 0
    elif value[0] == DOUBLE and (value[1] & 0x7f) == 0x7f and (value[2] & 0xf0) == 0xf0:
        if value[2] & 0x0f or value[3] or value[4] or value[5] or value[6] or value[7] or value[8]:
            memcpy(value + 1, b"\x7f\xf8\0\0\0\0\0\0", 8)
    elif value[0] == FLOAT and (value[1] & 0x7f) == 0x7f and value[2] & 0x80:
        if value[2] & 0x7f or value[3] or value[4]:
            memcpy(value + 1, b"\x7f\xc0\0\0", 4)


# ---- decoding -------------------------------------------------------------------------------------------------------

cdef inline bint is_blank(const uint8_t* data, uint32_t size) noexcept nogil:
    """Returns whether Java calls the text blank: it consists of ASCII white space."""
    cdef uint32_t i
    for i in range(size):
        if not (data[i] == 0x20 or 0x09 <= data[i] <= 0x0d or 0x1c <= data[i] <= 0x1f):
            return False
    return True


cdef inline int namespace_decode(const uint8_t* body, uint32_t size, Request* request) noexcept nogil:
    """Decodes the namespace of a PING to data and size. Returns the same as request_decode(). See section "PING"."""
    if size < 4:
        return FAIL if size == 0 else BAD_REQUEST
    request.size = load_be32(body)
    if request.size > size - 4:
        return BAD_REQUEST
    request.data = body + 4
    return FAIL if is_blank(request.data, request.size) else OK


cdef inline int values_decode(const uint8_t* body, uint32_t size, Request* request) noexcept nogil:
    """Decodes and checks the values of a PARAM. Returns the same as request_decode(). See section "PARAM"."""
    cdef uint32_t place = PARAM_HEAD, taken, _value
    request.values = load_be32(body + 12)
    if <int32_t>request.values <= 0 or request.values > size // VALUES_MIN:
        return BAD_REQUEST
    for _value in range(request.values):
        taken = value_size(body + place, size - place)
        if taken == 0:
            return BAD_REQUEST
        place += taken
    request.data = body + PARAM_HEAD
    request.size = place - PARAM_HEAD
    return OK


cdef inline int request_decode(const Frame* frame, Request* request) noexcept nogil:
    """Decodes a request. Returns OK, or the status of the reply if the request is invalid.

    Decodes the head even if the request is invalid. A valid PING is decoded by namespace_decode() instead.
    """
    cdef const uint8_t* body = frame.key
    if frame.size < HEAD_SIZE:
        request.type = PING
        request.kind = TYPES
        request.xid = 0
        return BAD_REQUEST
    request.type = frame.data[6]
    request.kind = min(request.type, <uint8_t>TYPES)
    request.xid = load_be32(frame.data + LENGTH_SIZE)
    if frame.parse_result != OK:
        return BAD_REQUEST
    request.tag = frame.tag
    request.id = body
    if request.kind == RELEASE or request.kind == KEEP:
        return OK
    request.count = load_be32(body + ID_SIZE)
    if <int64_t>load_be64(body) <= 0 or <int32_t>request.count <= 0:
        return BAD_REQUEST
    if request.kind == PARAM:
        return values_decode(body, frame.key_size, request)
    request.prioritized = frame.key_size > 12 and body[12] != 0
    return OK


# ---- encoding -------------------------------------------------------------------------------------------------------

cdef inline uint32_t reply_encode(uint8_t* target, uint32_t xid, uint8_t type, const Answer* answer) noexcept nogil:
    """Writes the reply to a request of a type, at most REPLY_SIZE bytes. Returns the size of the reply."""
    cdef uint8_t* body = target + REPLY_HEAD
    cdef uint32_t size = 0
    if type == FLOW or type == PARAM:
        store_be32(body, <uint32_t>answer.remaining)
        store_be32(body + 4, <uint32_t>answer.wait_ms)
        size = 8
    elif type == ACQUIRE:
        store_be64(body, <uint64_t>answer.value)
        size = 8
    elif type == KEEP or type == PING and answer.status == OK:
        store_be32(body, <uint32_t>answer.value)
        size = 4
    store_be16(target, <uint16_t>(REPLY_HEAD - LENGTH_SIZE + size))
    store_be32(target + 2, xid)
    target[6] = type
    target[7] = <uint8_t>answer.status
    return REPLY_HEAD + size
