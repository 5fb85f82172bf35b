# Replies of the sentinel room, as they are on the wire. docs/protocols/sentinel.md, "On the wire".
#
# Floor 2, header only.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from counterd.byteorder cimport store_be16, store_be32, store_be64

cdef enum:
    REPLY_HEAD = 8          # length, xid, type, status
    REPLY_SIZE = 16         # of the longest

# Message types.
cdef enum:
    PING = 0
    FLOW = 1
    PARAM = 2
    ACQUIRE = 3
    RELEASE = 4
    KEEP = 5
    TYPES = 6


cdef inline uint8_t* reply_begin(uint8_t* target, uint32_t xid, uint8_t message, int status, uint32_t body) noexcept:
    """Writes what is in front of a body of so many bytes, and returns where that goes."""
    store_be16(target, <uint16_t>(REPLY_HEAD - 2 + body))
    store_be32(target + 2, xid)
    target[6] = message
    target[7] = <uint8_t>status
    return target + REPLY_HEAD


cdef inline uint32_t reply_numbers(
    uint8_t* target, uint32_t xid, uint8_t message, int status, int32_t one, int32_t other
) noexcept:
    """Of FLOW and PARAM; returns its size."""
    target = reply_begin(target, xid, message, status, 8)
    store_be32(target, <uint32_t>one)
    store_be32(target + 4, <uint32_t>other)
    return REPLY_HEAD + 8


cdef inline uint32_t reply_call(uint8_t* target, uint32_t xid, uint8_t message, int status, int64_t value) noexcept:
    """Of ACQUIRE, RELEASE and KEEP, with the token, nothing, or how long the lease is; returns its size."""
    cdef uint32_t body = 8 if message == ACQUIRE else 4 if message == KEEP else 0
    target = reply_begin(target, xid, message, status, body)
    if message == ACQUIRE:
        store_be64(target, <uint64_t>value)
    elif message == KEEP:
        store_be32(target, <uint32_t>value)
    return REPLY_HEAD + body
