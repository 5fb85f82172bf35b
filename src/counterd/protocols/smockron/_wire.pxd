# The wire of the smockron protocol: frames of ZMTP 3.0 and 3.1, and numbers in messages.
#
# Floor 2, header only. Section names are those of docs/protocols/smockron.md. Independent of the store.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from counterd.engine.byteorder cimport load_be64, store_be64

cdef enum:
    GREETING_SIZE = 64
    SIGNATURE_SIZE = 10
    MAJOR_AT = 10           # in a greeting
    MINOR_AT = 11
    MECHANISM_AT = 12
    MECHANISM_SIZE = 20
    VERSION_MAJOR = 3
    VERSION_MINOR = 1

    MORE = 1                # flags of a frame
    LONG = 2
    COMMAND = 4
    RESERVED = 0xf8
    SHORT_HEAD = 2
    LONG_HEAD = 9
    SHORT_MAX = 255

    FRAMES_MAX = 64         # most frames of a message; usually it has six
    PARTS = 6               # frames of an accounting message that are read
    PARTS_MIN = 5           # fewest frames of an accounting message
    CONTEXT_MAX = 16        # bytes of a PING that a PONG repeats
    NUMBER_MAX = 20         # digits of a time
    COMMAND_MAX = 64        # bytes of a command that this side sends, including its head

cdef extern from *:
    """
    #define COUNTERD_MOMENT_MAX_MS INT64_C(9223372036854)
    #define COUNTERD_AHEAD_MAX_MS INT64_C(31622400000)
    """
    const int64_t MOMENT_MAX_MS "COUNTERD_MOMENT_MAX_MS"    # in nanoseconds it fits into an int64: the year 2262
    const int64_t AHEAD_MAX_MS "COUNTERD_AHEAD_MAX_MS"      # 366 days: the longest delay

cdef enum Verdict:          # of a frame, from parse_frame
    GREETING = 0
    CONTENT = 1             # a message, perhaps with commands in it; or a command alone
    FIRST_BROKEN = 2        # this and the next: framing is lost
    NOT_ZMTP = 2
    OLD_VERSION = 3
    OTHER_MECHANISM = 4
    WRONG_FLAGS = 5
    TOO_LONG = 6
    TOO_MANY = 7
    PARSE_RESULTS = 8


cdef struct Part:           # a frame of ZMTP
    const uint8_t* data     # its body
    uint64_t size
    uint32_t head           # bytes before the body
    uint8_t flags


# ---- greeting --------------------------------------------------------------------------------------------------------

cdef inline void greeting_write(uint8_t* target) noexcept nogil:
    """Writes the greeting of a peer that binds, with the mechanism NULL: GREETING_SIZE bytes.

    See section "Greeting".
    """
    memset(target, 0, GREETING_SIZE)
    target[0] = 0xff
    target[SIGNATURE_SIZE - 1] = 0x7f
    target[MAJOR_AT] = VERSION_MAJOR
    target[MINOR_AT] = VERSION_MINOR
    memcpy(target + MECHANISM_AT, b"NULL", 4)


cdef inline int greeting_check(const uint8_t* data, size_t size) noexcept nogil:
    """Checks the first `size` bytes of a greeting. Returns GREETING, or a Verdict that says what is wrong."""
    cdef const char* mechanism = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    if size >= SIGNATURE_SIZE and not data[SIGNATURE_SIZE - 1] & 1:
        return OLD_VERSION
    if size > MAJOR_AT and data[MAJOR_AT] < VERSION_MAJOR:
        return OLD_VERSION
    if size >= MECHANISM_AT + MECHANISM_SIZE and memcmp(data + MECHANISM_AT, mechanism, MECHANISM_SIZE) != 0:
        return OTHER_MECHANISM
    return GREETING


# ---- frames ----------------------------------------------------------------------------------------------------------

cdef inline int part_read(const uint8_t* data, size_t size, Part* part) noexcept nogil:
    """Reads the head of a frame.

    Returns 1; 0 if more bytes are needed; or -1 if the flags are wrong. See section "Frames".
    """
    part.flags = data[0]
    if part.flags & RESERVED or part.flags & COMMAND and part.flags & MORE:
        return -1
    part.head = LONG_HEAD if part.flags & LONG else SHORT_HEAD
    if size < part.head:
        return 0
    part.size = load_be64(data + 1) if part.flags & LONG else data[1]
    part.data = data + part.head
    return 1


cdef inline size_t part_size(size_t size) noexcept nogil:
    """Returns the size of a frame with a body of `size` bytes."""
    return (SHORT_HEAD if size <= SHORT_MAX else LONG_HEAD) + size


cdef inline uint8_t* part_write(uint8_t* target, uint8_t flags, const void* data, size_t size) noexcept nogil:
    """Writes a frame. Returns the end of the frame."""
    if size <= SHORT_MAX:
        target[0] = flags
        target[1] = <uint8_t>size
        target += SHORT_HEAD
    else:
        target[0] = flags | LONG
        store_be64(target + 1, size)
        target += LONG_HEAD
    memcpy(target, data, size)
    return target + size


cdef inline bint part_equals(const Part* part, const char* text, size_t size) noexcept nogil:
    return part.size == size and memcmp(part.data, text, size) == 0


cdef inline bint command_is(const Part* part, const char* name, size_t size) noexcept nogil:
    """Returns whether a command has this name."""
    return part.size > size and part.data[0] == size and memcmp(part.data + 1, name, size) == 0


# ---- metadata --------------------------------------------------------------------------------------------------------

cdef inline bint name_is(const uint8_t* name, const char* lower, size_t size) noexcept nogil:
    """Compares a name with a lower-case name, ignoring case."""
    cdef size_t i
    for i in range(size):
        if (name[i] | 0x20 if 65 <= name[i] and name[i] <= 90 else name[i]) != <uint8_t>lower[i]:
            return False
    return True


cdef inline int ready_read(const uint8_t* data, size_t size, Part* socket_type) noexcept nogil:
    """Reads the properties of a READY command. Returns False if the properties are malformed. See section "Handshake".

    socket_type: gets the value of Socket-Type. The size of the value is 0 if the property is missing. Other properties
    are ignored.
    """
    cdef const uint8_t* end = data + size
    cdef uint64_t length, value
    socket_type.data = data
    socket_type.size = 0
    while data < end:
        length = data[0]
        if length == 0 or <uint64_t>(end - data) < 1 + length + 4:
            return False
        value = (
            <uint64_t>data[1 + length] << 24 | <uint64_t>data[2 + length] << 16
            | <uint64_t>data[3 + length] << 8 | data[4 + length]
        )
        if <uint64_t>(end - data) - (1 + length + 4) < value:
            return False
        if length == 11 and name_is(data + 1, b"socket-type", 11):
            socket_type.data = data + 1 + length + 4
            socket_type.size = value
        data += 1 + length + 4 + value
    return True


# ---- moments ---------------------------------------------------------------------------------------------------------

cdef inline bint is_digit(uint8_t byte) noexcept nogil:
    return 48 <= byte and byte <= 57


cdef inline int64_t moment_read(const Part* part) noexcept nogil:
    """Reads Unix time in milliseconds, in digits.

    Ignores a fraction. Returns -1 if the bytes are not a number, or if the number is above MOMENT_MAX_MS. See section
    "Accounting".
    """
    cdef int64_t found = 0
    cdef uint64_t i = 0
    while i < part.size and is_digit(part.data[i]):
        found = 10 * found + (part.data[i] - 48)
        if found > MOMENT_MAX_MS:
            return -1
        i += 1
    if i == 0:
        return -1
    if i < part.size and part.data[i] == 46:
        i += 1
        while i < part.size and is_digit(part.data[i]):
            i += 1
    return found if i == part.size else -1


cdef inline int number_write(uint8_t* target, uint64_t number) noexcept nogil:
    """Writes a number in digits, at most NUMBER_MAX. Returns the number of digits."""
    cdef uint8_t[NUMBER_MAX] digits
    cdef int size = 0, i
    while size == 0 or number:
        digits[size] = <uint8_t>(48 + number % 10)
        number //= 10
        size += 1
    for i in range(size):
        target[i] = digits[size - 1 - i]
    return size
