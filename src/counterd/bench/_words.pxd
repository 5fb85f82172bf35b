# What all dialects have in common: the outcomes of requests, replies, and templates of requests.
#
# Floor 5, header only. Requests of one kind differ in their name alone (and in what a codec puts into them besides), so
# each kind is a template that is copied and patched.

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd.bench._memory cimport allocate
from counterd.engine.byteorder cimport bswap64

cdef enum Outcome:
    ANSWERED                # there is nothing to say about it
    READ
    ABSENT                  # no such name
    GRANTED                 # a permit; or something may pass
    RELEASED
    REFUSED                 # the limit is reached
    NOT_HELD
    UPDATED
    WRITTEN
    PURGED
    TOO_MANY                # requests, for a namespace
    INSERTED
    RESERVED
    DELETED
    TAKEN                   # a message that is not answered itself
    DELAYED                 # a control message says so
    CANCELLED               # an acquire that waited when the load ended
    FAILED                  # the server says that something is wrong
    OUTCOMES

cdef enum:
    REPLY_MAX = 512         # no reply to what is asked here comes near it, but for the buffer that may be in it
    NAMES_MAX = 16          # of a request
    TRAILER_MAX = 32        # bytes that a codec may put behind a template, or behind the last request of a batch


cdef struct Template:
    uint8_t* data
    size_t size
    size_t name_at          # where the name's last digits stand
    int digits              # 0 = it has no such name
    size_t also_at[NAMES_MAX - 1]  # and those of other names with the same number
    int also
    size_t spot             # where the codec has something else to write, 0 = nowhere


cdef struct Reply:
    Outcome outcome
    int64_t value           # of READ and GRANTED, where the protocol says it, else -1
    uint64_t token          # of GRANTED, where permits have such: what was asked with, or told; of RESERVED the id
    const uint8_t* body     # of RESERVED, of the size that buffers have
    bint goes_on            # it answers the next request as well, and has not been taken
    bint is_part            # it answers a part of the request; more will come


cdef inline int template_make(Template* template, bytes data, bytes name, int digits) except -1:
    """Makes a template of a request with this name, whose last digits will be overwritten."""
    cdef Py_ssize_t at = data.rfind(name)
    template.size = len(data)
    template.data = <uint8_t*>allocate(len(data), 1)
    memcpy(template.data, PyBytes_AS_STRING(data), len(data))
    if at >= 0:
        template.name_at = at + len(name) - digits
        template.digits = digits
    return 0


cdef inline int template_add_names(Template* template, bytes data, bytes other) except -1:
    """Notes that the template contains several names with the same number.

    other: the same request with another number.
    """
    at = [i for i in range(len(data)) if data[i] != other[i]][:: max(template.digits, 1)]
    at.remove(template.name_at)
    template.also = len(at)
    for i in range(template.also):
        template.also_at[i] = at[i]
    return 0


cdef inline size_t template_write(const Template* template, uint32_t name, uint8_t* target) noexcept nogil:
    """Writes the request for a name. Returns the size of the request."""
    cdef int i
    memcpy(target, template.data, template.size)
    if template.digits == 8:  # a constant size is written in one go
        name_write(target + template.name_at, name, 8)
    elif template.digits:
        name_write(target + template.name_at, name, template.digits)
    for i in range(template.also):
        name_write(target + template.also_at[i], name, template.digits)
    return template.size


cdef inline void name_write(uint8_t* target, uint32_t number, int digits) noexcept nogil:
    """Writes the last 1 to 8 hexadecimal digits of a number.

    Each half byte is expanded to a byte, all of them at the same time.
    """
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
    """Reads digits that name_write() has written. For other digits the result is undefined."""
    cdef uint64_t number = 0
    cdef size_t i
    for i in range(digits):
        number = number << 4 | ((data[i] & 15) + (9 if data[i] > 57 else 0))
    return number


cdef inline void long_write(uint8_t* target, uint64_t number) noexcept nogil:
    """Writes all 16 hexadecimal digits of a number."""
    name_write(target, <uint32_t>(number >> 32), 8)
    name_write(target + 8, <uint32_t>number, 8)
