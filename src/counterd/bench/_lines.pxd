# Lines of text, which end with CR LF, and the numbers in them: for the codecs of protocols that are made of such.
#
# Floor 5, header only.

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memchr, memcmp, strlen

cdef enum:
    NUMBER_MAX = 32         # characters of a number with its line's end: 20 digits and some


cdef inline size_t line_size(const uint8_t* data, size_t size) noexcept nogil:
    """Returns the size of the first line, including CR LF. 0 means that the line is not complete."""
    cdef const uint8_t* end = <const uint8_t*>memchr(data, 10, size)
    return 0 if end == NULL else end - data + 1


cdef inline bint begins(const uint8_t* data, size_t size, const char* words) noexcept nogil:
    return size >= strlen(words) and memcmp(data, words, strlen(words)) == 0


cdef inline bint number_read(const uint8_t* data, size_t size, int64_t* value) noexcept nogil:
    """Reads decimal digits up to CR LF. A sign may precede them, and spaces may follow."""
    cdef size_t first = 1 if data[0] == 45 else 0
    cdef size_t at = first
    cdef int64_t number = 0
    if size > NUMBER_MAX:
        return False
    while at < size and at < first + 18 and 48 <= data[at] <= 57:
        number = number * 10 + data[at] - 48
        at += 1
    value[0] = -number if first else number
    if at == first:
        return False
    while at < size and data[at] == 32:
        at += 1
    return at + 2 == size and data[at] == 13
