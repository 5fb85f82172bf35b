# Byte order and memory hints.
#
# Floor 0, header only. Loads and stores use memcpy, so addresses need no alignment. Compilers make one instruction of
# each.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "counterd is built for little-endian machines"
    #endif
    """
    uint16_t bswap16 "__builtin_bswap16"(uint16_t value) noexcept nogil
    uint32_t bswap32 "__builtin_bswap32"(uint32_t value) noexcept nogil
    uint64_t bswap64 "__builtin_bswap64"(uint64_t value) noexcept nogil
    void prefetch "__builtin_prefetch"(const void* address) noexcept nogil
    long expected "__builtin_expect"(long value, long usual) noexcept nogil


cdef inline uint16_t load_be16(const uint8_t* source) noexcept nogil:
    cdef uint16_t value
    memcpy(&value, source, 2)
    return bswap16(value)


cdef inline uint32_t load_be32(const uint8_t* source) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, source, 4)
    return bswap32(value)


cdef inline uint64_t load_be64(const uint8_t* source) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, source, 8)
    return bswap64(value)


cdef inline uint64_t load_le64(const uint8_t* source) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, source, 8)
    return value


cdef inline uint16_t load_le16(const uint8_t* source) noexcept nogil:
    cdef uint16_t value
    memcpy(&value, source, 2)
    return value


cdef inline uint32_t load_le32(const uint8_t* source) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, source, 4)
    return value


cdef inline void store_be16(uint8_t* target, uint16_t value) noexcept nogil:
    value = bswap16(value)
    memcpy(target, &value, 2)


cdef inline void store_be32(uint8_t* target, uint32_t value) noexcept nogil:
    value = bswap32(value)
    memcpy(target, &value, 4)


cdef inline void store_be64(uint8_t* target, uint64_t value) noexcept nogil:
    value = bswap64(value)
    memcpy(target, &value, 8)


cdef inline void store_le16(uint8_t* target, uint16_t value) noexcept nogil:
    memcpy(target, &value, 2)


cdef inline void store_le32(uint8_t* target, uint32_t value) noexcept nogil:
    memcpy(target, &value, 4)


cdef inline void store_le64(uint8_t* target, uint64_t value) noexcept nogil:
    memcpy(target, &value, 8)
