# The wire of the throttr protocol, for the server; wire.py is for clients.
#
# Floor 2, header only. Section names are those of the protocol's document. Integers are little-endian; N is the bytes
# of a number, a setting of the store.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport Frame
from counterd.engine.byteorder cimport load_le16, load_le32, load_le64, store_le64
from counterd.protocols.throttr._keys cimport Key, Keys, value_read

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

cdef enum Attribute:        # what an UPDATE changes
    QUOTA = 0
    TTL = 1

cdef enum Change:           # how an UPDATE changes it
    PATCH = 0
    INCREASE = 1
    DECREASE = 2

cdef enum:
    ID_SIZE = 16            # bytes of a connection's id
    STAT_SIZE = 32          # bytes of a key's statistics
    MESSAGE_MAX = 67108864  # the highest max_message: a value's bytes and blocks are counted with 32 bits
    REPLY_MIN = 65536       # room for every reply whose size does not depend on the longest request
    REPLY_BESIDE = 64       # bytes by which a GET's reply exceeds its SET: the statuses of 16 EVENTs, 8 bytes of put()


cdef struct Layout:         # of a request
    uint8_t head            # bytes before the name; 0 = there is no such request
    uint8_t name_at         # offset of the name's size, one byte; 0 = no name
    uint8_t value_at        # offset of the value's size, N bytes; 0 = no value


cdef inline void layouts_set(Layout* layouts, uint8_t n) noexcept nogil:
    """Sets the layouts of all requests. See section "Request types"."""
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
    """Loads a number of N bytes. See section "Dynamic Value Size"."""
    if width == 2:
        return load_le16(source)
    if width == 1:
        return source[0]
    if width == 4:
        return load_le32(source)
    return load_le64(source)


cdef inline uint8_t* put(uint8_t* target, uint64_t number) noexcept nogil:
    """Writes 8 bytes of a reply. Returns the end of these bytes."""
    store_le64(target, number)
    return target + 8


# ---- decoding and encoding of requests for one key or one subscription ---------------------------------------------

cdef struct Request:
    uint8_t opcode
    uint8_t ttl_type        # INSERT, SET
    uint8_t attribute       # UPDATE
    uint8_t change          # UPDATE
    uint32_t tag            # of the name
    uint32_t name_size
    uint32_t value_size     # SET
    uint64_t number         # INSERT: the quota; UPDATE: the new value or the difference
    uint64_t ttl            # INSERT, SET
    const uint8_t* name     # in a SET, the value follows


cdef struct Answer:
    bint accepted
    uint8_t ttl_type        # QUERY, GET
    uint32_t size           # GET: bytes of the value
    const Key* key          # GET: has the value
    uint64_t quota          # QUERY
    uint64_t ttl            # QUERY, GET
    uint8_t[STAT_SIZE] stat  # STAT: the statistics before this read


cdef inline void request_decode(const Frame* frame, const Layout* layout, int n, Request* request) noexcept nogil:
    """Decodes a request from a complete frame."""
    cdef const uint8_t* data = frame.data
    request.opcode = data[0]
    request.tag = frame.tag
    request.name = frame.key
    request.name_size = frame.key_size
    if request.opcode == UPDATE:
        request.attribute = data[1]
        request.change = data[2]
        request.number = load_number(data + 3, n)
    elif request.opcode == INSERT:
        request.number = load_number(data + 1, n)
        request.ttl_type = data[1 + n]
        request.ttl = load_number(data + 2 + n, n)
    elif request.opcode == SET:
        request.ttl_type = data[1]
        request.ttl = load_number(data + 2, n)
        request.value_size = frame.size - layout.head - frame.key_size


cdef inline uint32_t reply_encode(
    uint8_t* target, uint8_t opcode, int n, const Keys* keys, const Answer* answer
) noexcept nogil:
    """Writes the reply. Returns the size of the reply. 8 bytes after the reply may be overwritten."""
    target[0] = answer.accepted
    if not answer.accepted:
        return 1
    if opcode == QUERY:
        store_le64(target + 1, answer.quota)
        target[1 + n] = answer.ttl_type
        store_le64(target + 2 + n, answer.ttl)
        return 2 + 2 * n
    if opcode == GET:
        target[1] = answer.ttl_type
        store_le64(target + 2, answer.ttl)
        store_le64(target + 2 + n, answer.size)
        if answer.size:
            value_read(keys, answer.key, target + 2 + 2 * n)
        return 2 + 2 * n + answer.size
    if opcode == STAT:
        memcpy(target + 1, answer.stat, STAT_SIZE)
        return 1 + STAT_SIZE
    return 1
