# The wire of the counter protocol: decodes requests and encodes replies.
#
# Floor 2, header only. Section names are those of the protocol's document ("Counter support"). The decision about a
# request is an Answer.

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy, strlen

from counterd._core cimport Frame
from counterd.engine.byteorder cimport load_be32, load_le32, store_be32, store_le32

cdef enum Opcode:
    NOOP = 0x00
    GET = 0x01
    ACQUIRE = 0x02
    RELEASE = 0x03
    STATS = 0x10
    DUMP = 0x11
    OPCODES = 0x12

cdef enum Flag:
    LIMITS = 0x01           # of a Dump: entries end with the counter's limit

cdef enum Status:
    NO_ERROR = 0x00
    NOT_FOUND = 0x01
    INVALID_ARGUMENTS = 0x04
    RESOURCE_NOT_AVAILABLE = 0x21
    NOT_ACQUIRED = 0x22
    UNKNOWN_COMMAND = 0x81
    OUT_OF_MEMORY = 0x82

cdef enum:
    REQUEST_MAGIC = 0x90
    RESPONSE_MAGIC = 0x91
    HEADER_SIZE = 12
    BODY_MAX = 65545        # bytes of the longest request body: an Acquire, 4 + 4 + 2 + a name of 65,535
    REPLY_MAX = 65573       # bytes of the longest reply: a Dump entry, 12 + 10 + a name of 65,535 + 4, and its end, 12


cdef struct Request:        # without the name, which is the frame's key
    uint8_t opcode
    uint32_t resources      # ACQUIRE, RELEASE
    uint32_t maximum        # ACQUIRE


cdef struct Answer:
    uint8_t status
    uint32_t number         # GET: consumption; ACQUIRE: resources
    const char* text        # of a refusal; NULL: the text of the status


cdef inline const char* error_text(uint8_t status) noexcept nogil:
    """Returns the text of a status, as in the reference implementation. Section "Response status"."""
    if status == NOT_FOUND:
        return b"Not found"
    if status == INVALID_ARGUMENTS:
        return b"Invalid arguments"
    if status == RESOURCE_NOT_AVAILABLE:
        return b"Resource not available"
    if status == NOT_ACQUIRED:
        return b"Not acquired"
    if status == UNKNOWN_COMMAND:
        return b"Unknown command"
    return b"OutOfMemory"


cdef inline Request request_decode(const Frame* frame) noexcept nogil:
    """Decodes a request. The numbers are 0 if parsing has refused the frame."""
    cdef const uint8_t* body = frame.data + HEADER_SIZE
    cdef Request request = Request(frame.data[1], 0, 0)
    if request.opcode == ACQUIRE and frame.verdict == NO_ERROR:
        request.resources = load_be32(body)
        request.maximum = load_be32(body + 4)
    elif request.opcode == RELEASE and frame.verdict == NO_ERROR:
        request.resources = load_be32(body)
    return request


cdef inline uint8_t request_kind(const Frame* frame) noexcept nogil:
    """Returns the opcode, or OPCODES if the opcode is unknown or the magic is wrong."""
    return frame.data[1] if frame.data[0] == REQUEST_MAGIC and frame.data[1] < OPCODES else <uint8_t>OPCODES


cdef inline uint32_t frame_opaque(const Frame* frame) noexcept nogil:
    """Returns the opaque field, which the reply echoes, without changing its byte order."""
    return load_le32(frame.data + 8)


cdef inline uint8_t* header_encode(
    uint8_t* target, uint8_t opcode, uint8_t status, uint32_t opaque, uint32_t size
) noexcept nogil:
    """Writes the header of a reply. Returns where the body of `size` bytes goes. Section "Response header"."""
    target[0] = RESPONSE_MAGIC
    target[1] = opcode
    target[2] = status
    target[3] = 0
    store_be32(target + 4, size)
    store_le32(target + 8, opaque)
    return target + HEADER_SIZE


cdef inline uint32_t reply_encode(uint8_t* target, const Frame* frame, const Answer* answer) noexcept nogil:
    """Writes the reply to a request for one counter, or a refusal. Returns its size."""
    cdef uint8_t opcode = frame.data[1]
    cdef const char* text
    cdef uint32_t size
    if answer.status != NO_ERROR:
        text = error_text(answer.status) if answer.text == NULL else answer.text
        size = <uint32_t>strlen(text)
        memcpy(header_encode(target, opcode, answer.status, frame_opaque(frame), size), text, size)
        return HEADER_SIZE + size
    if opcode == ACQUIRE or opcode == GET:
        store_be32(header_encode(target, opcode, NO_ERROR, frame_opaque(frame), 4), answer.number)
        return HEADER_SIZE + 4
    header_encode(target, opcode, NO_ERROR, frame_opaque(frame), 0)
    return HEADER_SIZE
