# SipHash-1-3: the keyed hash of names that clients choose. The key prevents attacks with many names for one slot.
#
# Floor 0, header only. tests/unit/engine/test_siphash.py checks it with the reference implementation's vectors.

from libc.stdint cimport uint8_t, uint64_t

from counterd.engine.byteorder cimport load_le64


cdef struct SipState:
    uint64_t v0
    uint64_t v1
    uint64_t v2
    uint64_t v3


cdef inline uint64_t rotate_left(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline void sip_round(SipState* s) noexcept nogil:
    s.v0 += s.v1
    s.v1 = rotate_left(s.v1, 13) ^ s.v0
    s.v0 = rotate_left(s.v0, 32)
    s.v2 += s.v3
    s.v3 = rotate_left(s.v3, 16) ^ s.v2
    s.v0 += s.v3
    s.v3 = rotate_left(s.v3, 21) ^ s.v0
    s.v2 += s.v1
    s.v1 = rotate_left(s.v1, 17) ^ s.v2
    s.v2 = rotate_left(s.v2, 32)


cdef inline SipState sip_begin(const uint64_t* key) noexcept nogil:
    """Returns the state before the first byte. key: two 64-bit words."""
    cdef SipState s
    s.v0 = key[0] ^ <uint64_t>0x736f6d6570736575
    s.v1 = key[1] ^ <uint64_t>0x646f72616e646f6d
    s.v2 = key[0] ^ <uint64_t>0x6c7967656e657261
    s.v3 = key[1] ^ <uint64_t>0x7465646279746573
    return s


cdef inline uint64_t sip_hash(const SipState* begin, const uint8_t* data, size_t size) noexcept nogil:
    """Returns the 64-bit hash of `size` bytes. begin: of the key."""
    cdef SipState s = begin[0]
    cdef size_t words = size >> 3
    cdef uint64_t word
    cdef uint64_t last = <uint64_t>size << 56
    cdef int i
    while words:
        word = load_le64(data)
        s.v3 ^= word
        sip_round(&s)
        s.v0 ^= word
        data += 8
        words -= 1
    if size & 7:
        if size >= 8:           # the last eight bytes, without those of the word before
            last |= load_le64(data + (size & 7) - 8) >> (-8 * <int>size & 63)
        else:
            for i in range(<int>size):
                last |= <uint64_t>data[i] << (8 * i)
    s.v3 ^= last
    sip_round(&s)
    s.v0 ^= last
    s.v2 ^= 0xff
    sip_round(&s)
    sip_round(&s)
    sip_round(&s)
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3


cdef inline uint64_t siphash13(const uint64_t* key, const uint8_t* data, size_t size) noexcept nogil:
    """Returns the 64-bit hash of `size` bytes. key: two 64-bit words."""
    cdef SipState begin = sip_begin(key)
    return sip_hash(&begin, data, size)
