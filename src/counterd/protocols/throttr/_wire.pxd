# The throttr protocol on the wire, as the engine's side needs it; wire.py is the clients' side of the same.
#
# Floor 2, header only. Section names are those of the protocol's document. Integers are little-endian; N is the width
# of a number, which a store is made with.

from libc.stdint cimport uint8_t, uint64_t

from counterd.engine.byteorder cimport load_le16, load_le32, load_le64, store_le64

cdef enum Opcode:
    INSERT = 0x01
    QUERY = 0x02
    UPDATE = 0x03
    PURGE = 0x04
    SET = 0x05
    GET = 0x06
    LIST = 0x07
    INFO = 0x08
    STAT = 0x09
    STATS = 0x10
    SUBSCRIBE = 0x11
    UNSUBSCRIBE = 0x12
    PUBLISH = 0x13
    CONNECTIONS = 0x14
    CONNECTION = 0x15
    CHANNELS = 0x16
    CHANNEL = 0x17
    WHOAMI = 0x18
    EVENT = 0x19
    OPCODES = 0x1a

cdef enum Attribute:        # of an UPDATE: what is changed
    QUOTA = 0
    TTL = 1

cdef enum Change:           # of an UPDATE: how
    PATCH = 0
    INCREASE = 1
    DECREASE = 2

cdef enum:
    ID_SIZE = 16            # bytes of a connection's id
    MESSAGE_MAX = 67108864  # bytes that a request may be allowed: sizes and blocks of a value are counted in 32 bits
    REPLY_MIN = 65536       # room for every reply whose size does not depend on the longest request
    REPLY_BESIDE = 64       # what a GET is longer than the SET before it: the statuses of 16 EVENTs, 8 bytes of put()


cdef struct Layout:         # of a request: its bytes up to the name, and where sizes are; head 0 = there is none
    uint8_t head
    uint8_t name_at         # where the size of the name is, one byte; 0 = it has no name
    uint8_t value_at        # where the size of the value is, N bytes; 0 = it has no value


cdef inline void layouts_set(Layout* layouts, uint8_t n) noexcept nogil:
    """Section "Request types": the bytes before the name, and where in them the sizes of name and value are."""
    layouts[<int>INSERT] = Layout(3 + 2 * n, 2 + 2 * n, 0)
    layouts[<int>QUERY] = Layout(2, 1, 0)
    layouts[<int>UPDATE] = Layout(4 + n, 3 + n, 0)
    layouts[<int>PURGE] = Layout(2, 1, 0)
    layouts[<int>SET] = Layout(3 + 2 * n, 2 + n, 3 + n)
    layouts[<int>GET] = Layout(2, 1, 0)
    layouts[<int>LIST] = Layout(1, 0, 0)
    layouts[<int>INFO] = Layout(1, 0, 0)
    layouts[<int>STAT] = Layout(2, 1, 0)
    layouts[<int>STATS] = Layout(1, 0, 0)
    layouts[<int>SUBSCRIBE] = Layout(2, 1, 0)
    layouts[<int>UNSUBSCRIBE] = Layout(2, 1, 0)
    layouts[<int>PUBLISH] = Layout(2 + n, 1, 2)
    layouts[<int>CONNECTIONS] = Layout(1, 0, 0)
    layouts[<int>CONNECTION] = Layout(1 + ID_SIZE, 0, 0)
    layouts[<int>CHANNELS] = Layout(1, 0, 0)
    layouts[<int>CHANNEL] = Layout(2, 1, 0)
    layouts[<int>WHOAMI] = Layout(1, 0, 0)
    layouts[<int>EVENT] = Layout(2 + n, 1, 2)


cdef inline uint64_t load_number(const uint8_t* source, int width) noexcept nogil:
    """N bytes. Section "Dynamic Value Size"."""
    if width == 2:
        return load_le16(source)
    if width == 1:
        return source[0]
    if width == 4:
        return load_le32(source)
    return load_le64(source)


cdef inline uint8_t* put(uint8_t* target, uint64_t number) noexcept nogil:
    """Eight bytes of a reply; returns where the next go."""
    store_le64(target, number)
    return target + 8
