# The wire of the counter protocol: decodes requests and encodes replies.
#
# Floor 2, header only. Section names are those of the protocol's document ("Counter support"). The decision about a
# request is an Answer.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, strlen

from counterd._core cimport Frame
from counterd.engine.byteorder cimport (
    load_be16, load_be32, load_be64, load_le32, store_be32, store_be64, store_le32,
)
from counterd.engine.fair cimport WEIGHT_MAX
from counterd.protocols.counter._items cimport ITEMS_MAX, Item
from counterd.protocols.counter._rates cimport LIMIT_MAX, Pace
from counterd.protocols.counter._takes cimport REFUNDED

cdef enum Opcode:
    NOOP = 0x00
    GET = 0x01
    ACQUIRE = 0x02
    RELEASE = 0x03
    STATS = 0x10
    DUMP = 0x11
    TAKE = 0x20             # this one and those below: extensions of counterd
    CANCEL = 0x21
    SETTLE = 0x22
    RESUME = 0x23
    GOODBYE = 0x24
    WHO = 0x25
    HELD = 0x26
    OPCODES = 0x27

cdef enum Flag:
    LIMITS = 0x01           # of a Dump: entries end with the counter's limit
    EVERYWHERE = 0x02       # of a Get or a Dump: what all daemons use of a shared counter

cdef enum Status:
    NO_ERROR = 0x00
    NOT_FOUND = 0x01
    INVALID_ARGUMENTS = 0x04
    RESOURCE_NOT_AVAILABLE = 0x21
    NOT_ACQUIRED = 0x22
    CANCELLED = 0x23
    UNKNOWN_COMMAND = 0x81
    OUT_OF_MEMORY = 0x82

cdef enum:
    REQUEST_MAGIC = 0x90
    RESPONSE_MAGIC = 0x91
    HEADER_SIZE = 12
    BODY_MAX = 65545        # bytes of the longest request body: an Acquire, 4 + 4 + 2 + a name of 65,535
    REPLY_MAX = 65573       # bytes of the longest reply: a Dump entry, 12 + 10 + a name of 65,535 + 4, and its end, 12


cdef extern from *:
    """
    #define COUNTERD_PERIOD_MAX_US UINT64_C(316224000000000)
    """
    const uint64_t PERIOD_MAX_US "COUNTERD_PERIOD_MAX_US"   # ten years

cdef enum:
    TAKE_HEAD = 10          # bytes before the key
    TAKE_MAX = 65824        # bytes of the body: a rate with the longest name, and the longest key
    PERMIT_HEAD = 12        # bytes of an item before its name
    RATE_HEAD = 24
    KEY_MAX = 255
    PERMIT = 1              # kinds of items
    RATE = 2
    NAMED_RATE = 3          # whose numbers are the server's
    SHORTAGE_HEAD = 13      # bytes before the text: see shortage_encode()
    TEXT_MAX = 80           # bytes of a text with a number, and its final 0
    NO_TIME = 0xffffffff    # milliseconds: nobody knows
    TAKE_REPLY_MAX = 112    # bytes of the longest reply to a Take: 12 + SHORTAGE_HEAD + TEXT_MAX; a grant has up to 84


cdef struct Request:        # without the name, which is the frame's key
    uint8_t opcode
    uint32_t resources      # ACQUIRE, RELEASE
    uint32_t maximum        # ACQUIRE


cdef struct Answer:
    uint8_t status
    uint32_t number         # GET: consumption; ACQUIRE: resources
    const char* text        # of a refusal, as for text_write(); NULL: the text of the status


cdef inline const char* error_text(uint8_t status) noexcept nogil:
    """Returns the text of a status, as yrmcdsd sends it. See section "Response status"."""
    if status == NOT_FOUND:
        return b"Not found"
    if status == INVALID_ARGUMENTS:
        return b"Invalid arguments"
    if status == RESOURCE_NOT_AVAILABLE:
        return b"Resource not available"
    if status == NOT_ACQUIRED:
        return b"Not acquired"
    if status == CANCELLED:
        return b"Cancelled"
    if status == UNKNOWN_COMMAND:
        return b"Unknown command"
    return b"OutOfMemory"


cdef inline bint take_simplify(const Frame* frame, Request* request) noexcept nogil:
    """Converts a valid Take of one permit to an Acquire, which is decided in the same way. Returns False for others."""
    cdef const uint8_t* body = frame.data + HEADER_SIZE
    cdef const uint8_t* item = body + TAKE_HEAD + load_be16(body + 8)
    if body[0] != 1 or load_be16(body + 2) > WEIGHT_MAX or load_be16(body + 8) > KEY_MAX:
        return False
    if item[0] != PERMIT or item[1] or frame.key_size == 0 or frame.key + frame.key_size != frame.data + frame.size:
        return False
    request.opcode = ACQUIRE
    request.resources = load_be32(item + 4)
    request.maximum = load_be32(item + 8)
    return 0 < request.resources <= request.maximum


cdef inline Request request_decode(const Frame* frame) noexcept nogil:
    """Decodes a valid request for one counter, or a Noop."""
    cdef const uint8_t* body = frame.data + HEADER_SIZE
    cdef Request request = Request(frame.data[1], 0, 0)
    if request.opcode == ACQUIRE:
        request.resources = load_be32(body)
        request.maximum = load_be32(body + 4)
    elif request.opcode == RELEASE:
        request.resources = load_be32(body)
    return request


cdef inline uint8_t request_kind(const Frame* frame) noexcept nogil:
    """Returns the opcode, or OPCODES if the opcode is unknown or the magic is wrong."""
    return frame.data[1] if frame.data[0] == REQUEST_MAGIC and frame.data[1] < OPCODES else <uint8_t>OPCODES


cdef inline uint32_t frame_opaque(const Frame* frame) noexcept nogil:
    """Returns the opaque field, which the reply repeats, without changing its byte order."""
    return load_le32(frame.data + 8)


cdef inline uint8_t* header_encode(
    uint8_t* target, uint8_t opcode, uint8_t status, uint32_t opaque, uint32_t size
) noexcept nogil:
    """Writes the header of a reply. Returns where the body of `size` bytes begins. See section "Response header"."""
    target[0] = RESPONSE_MAGIC
    target[1] = opcode
    target[2] = status
    target[3] = 0
    store_be32(target + 4, size)
    store_le32(target + 8, opaque)
    return target + HEADER_SIZE


cdef inline uint32_t refusal_encode(
    uint8_t* target, uint8_t opcode, uint8_t status, uint32_t opaque, const char* text
) noexcept nogil:
    cdef uint32_t size = <uint32_t>strlen(text)
    memcpy(header_encode(target, opcode, status, opaque, size), text, size)
    return HEADER_SIZE + size


cdef inline void text_write(char* target, const char* text, uint32_t number) noexcept nogil:
    """Writes a text of less than TEXT_MAX bytes, with the number in place of a %, and its final 0."""
    cdef char[10] digits
    cdef int count = 0
    while text[0]:
        if text[0] != b"%":
            target[0] = text[0]
            target += 1
        else:
            while number or count == 0:
                digits[count] = <char>(48 + number % 10)
                number //= 10
                count += 1
            while count:
                count -= 1
                target[0] = digits[count]
                target += 1
        text += 1
    target[0] = 0


cdef inline uint32_t success_encode(uint8_t* target, const Frame* frame, uint32_t number) noexcept nogil:
    """Writes the reply to a request for one counter that was executed. Returns the size of the reply."""
    cdef uint8_t opcode = frame.data[1]
    if opcode == ACQUIRE or opcode == GET:
        store_be32(header_encode(target, opcode, NO_ERROR, frame_opaque(frame), 4), number)
        return HEADER_SIZE + 4
    header_encode(target, opcode, NO_ERROR, frame_opaque(frame), 0)
    return HEADER_SIZE


cdef inline uint32_t reply_encode(uint8_t* target, const Frame* frame, const Answer* answer) noexcept nogil:
    """Writes the reply to a request for one counter, or a refusal. Returns the size of the reply."""
    cdef char[TEXT_MAX] text
    if answer.status == NO_ERROR:
        return success_encode(target, frame, answer.number)
    if answer.text == NULL:
        return refusal_encode(target, frame.data[1], answer.status, frame_opaque(frame), error_text(answer.status))
    text_write(text, answer.text, answer.number)
    return refusal_encode(target, frame.data[1], answer.status, frame_opaque(frame), text)


# ---- Take: docs/protocols/counter.md, section "Take" ---------------------------------------------------------------

cdef struct TakeHead:
    uint8_t count           # of items
    bint has_rates
    bint has_named          # a rate whose numbers are the server's
    uint8_t priority
    uint16_t weight
    uint32_t wait_ms        # 0: it does not wait
    const uint8_t* key
    uint16_t key_size       # 0: the key is the connection


cdef inline uint8_t take_peek(const uint8_t* body, uint32_t size, Frame* frame) noexcept nogil:
    """Finds the name of the first item, for prefetching. Returns the kind of the item, or 0 if a Take is too short."""
    cdef uint32_t item = TAKE_HEAD
    cdef uint32_t head
    if size < TAKE_HEAD + PERMIT_HEAD:
        return 0
    item += load_be16(body + 8)
    if size - PERMIT_HEAD < item:
        return 0
    head = RATE_HEAD if body[item] == RATE else PERMIT_HEAD
    frame.key_size = load_be16(body + item + 2)
    frame.key = body + item + head
    if size < item + head + frame.key_size:
        return 0
    return body[item]


cdef inline const uint8_t* head_decode(const uint8_t* body, uint32_t size, TakeHead* head) noexcept nogil:
    """Decodes a Take up to its first item. Returns where the item begins, or NULL if the Take is invalid."""
    if size < TAKE_HEAD:
        return NULL
    head.count = body[0]
    head.has_rates = False
    head.has_named = False
    head.priority = body[1]
    head.weight = load_be16(body + 2)
    head.wait_ms = load_be32(body + 4)
    head.key_size = load_be16(body + 8)
    head.key = body + TAKE_HEAD
    if not 1 <= head.count <= ITEMS_MAX or head.weight > WEIGHT_MAX or head.key_size > KEY_MAX:
        return NULL
    return head.key + head.key_size


cdef inline const uint8_t* item_decode(
    const uint8_t* data, const uint8_t* end, TakeHead* head, Item* item
) noexcept nogil:
    """Decodes an item of a Take, except for its tag. Returns where the item ends, or NULL if it is invalid."""
    if end - data < PERMIT_HEAD:
        return NULL
    item.name_size = load_be16(data + 2)
    item.amount = load_be32(data + 4)
    item.on_death = data[1]
    item.is_named = data[0] == NAMED_RATE
    if data[0] == PERMIT:
        item.maximum = load_be32(data + 8)
        item.pace.period_us = 0
        if item.amount > item.maximum or item.on_death:
            return NULL
        data += PERMIT_HEAD
    elif data[0] == RATE and end - data >= RATE_HEAD:
        head.has_rates = True
        item.pace.limit = load_be32(data + 8)
        item.pace.burst = load_be32(data + 12)
        item.pace.period_us = load_be64(data + 16)
        if not (
            0 < item.pace.limit <= LIMIT_MAX and 0 < item.pace.period_us <= PERIOD_MAX_US
            and item.amount <= item.pace.burst and item.on_death <= REFUNDED
        ):
            return NULL
        data += RATE_HEAD
    elif data[0] == NAMED_RATE:
        head.has_rates = head.has_named = True
        item.pace = Pace(1, 1, 0)   # until items_limit()
        if load_be32(data + 8) or item.on_death > REFUNDED:
            return NULL
        data += PERMIT_HEAD
    else:
        return NULL
    if item.name_size == 0 or item.amount == 0 or end - data < <Py_ssize_t>item.name_size:
        return NULL
    item.name = data
    return data + item.name_size


cdef inline uint32_t retry_ms(int64_t due_ns, int64_t now_ns) noexcept nogil:
    """Returns the milliseconds until due_ns, rounded up.

    Returns NO_TIME if due_ns is INT64_MAX, which means that the time is not known.
    """
    cdef int64_t left = (max(due_ns - now_ns, 0) + 999999) // 1000000
    return NO_TIME if due_ns == INT64_MAX or left >= NO_TIME else <uint32_t>left


cdef inline uint8_t* grant_encode(uint8_t* target, uint32_t opaque, uint64_t grant, int count) noexcept nogil:
    """Writes the reply to a Take that was granted, except for the amounts that are left. Returns where these go."""
    cdef uint8_t* body = header_encode(target, TAKE, NO_ERROR, opaque, 8 + 4 * <uint32_t>count)
    store_be64(body, grant)
    return body + 8


cdef inline uint32_t absence_encode(uint8_t* target, uint32_t opaque, uint8_t item) noexcept nogil:
    """Writes the reply to a Take that names a rate of which the server has no numbers.

    Returns the size of the reply.
    """
    cdef char[TEXT_MAX] text
    text_write(text, b"No limit for the rate of item %: send one, or add it to counter.limits", item)
    return refusal_encode(target, TAKE, NOT_FOUND, opaque, text)


cdef inline uint32_t shortage_encode(
    uint8_t* target, uint32_t opaque, uint8_t item, uint32_t left, uint32_t most, uint32_t retry_ms, const char* text
) noexcept nogil:
    """Writes the reply to a Take that was refused because too little of an item was available, or in a drain.

    left: how much of the item is left. most: its maximum, or the burst of the rate. Returns the size of the reply.
    """
    cdef uint32_t size = <uint32_t>strlen(text)
    cdef uint8_t* body = header_encode(target, TAKE, RESOURCE_NOT_AVAILABLE, opaque, SHORTAGE_HEAD + size)
    body[0] = item
    store_be32(body + 1, left)
    store_be32(body + 5, most)
    store_be32(body + 9, retry_ms)
    memcpy(body + SHORTAGE_HEAD, text, size)
    return HEADER_SIZE + SHORTAGE_HEAD + size


# ---- Resume: docs/protocols/counter.md, section "Resume" -----------------------------------------------------------

cdef enum:
    RESUME_SIZE = 4         # bytes of the body: the grace time in ms
    PRESENT_SIZE = 20       # likewise, with a token, 12, and the number of the attempt, 4
    RESUME_REPLY_SIZE = 16  # bytes of the reply: the token, and the grace time
