# Lists of records that are linked in both directions: a record can leave from any place in one step. Any number of
# lists share one array of records, and a record can be in several lists, with Links for each.
#
# Floor 1, header only. Records are linked by number. Numbers begin at 1; 0 means none. A list is the number of its
# first record, or its Ends if the last record is needed too. Whoever needs the length of a list counts it.
#
# Invariants (audit_list checks each):
# - a record names the record before it and the record after it, and is named by both;
# - the first record of a list names none before it, and the last one none after it.
#
# The links of a record that is in no list mean nothing, so `next` can link a free list.

from libc.stdint cimport uint8_t, uint32_t

from counterd.engine.debug cimport debug_check


cdef struct Links:          # at the same offset in each record
    uint32_t next
    uint32_t prev


cdef struct Ends:           # both are 0 if the list is empty
    uint32_t first
    uint32_t last


# The view of an array. It is made where it is used, so that the compiler knows all of it but `records`.
cdef struct List:
    void* records           # where record 0 would be
    size_t stride           # bytes from a record to the next
    Links* links            # of record 0


cdef inline Links* links_at(List list, uint32_t number) noexcept nogil:
    debug_check(number != 0)
    return <Links*>(<size_t>list.records + number * list.stride + (<size_t>list.links - <size_t>list.records))


# ---- lists of which only the first record is known -----------------------------------------------------------------

cdef inline void list_push(List list, uint32_t* first, uint32_t number) noexcept nogil:
    """Adds a record at the beginning of the list that begins at *first."""
    cdef uint32_t next = first[0]
    links_at(list, number)[0] = Links(next, 0)
    if next:
        links_at(list, next).prev = number
    first[0] = number


cdef inline void list_remove(List list, uint32_t* first, uint32_t number) noexcept nogil:
    """Removes a record from the list that begins at *first and contains it."""
    cdef Links own = links_at(list, number)[0]
    if own.prev:
        debug_check(links_at(list, own.prev).next == number)
        links_at(list, own.prev).next = own.next
    else:
        debug_check(first[0] == number)
        first[0] = own.next
    if own.next:
        debug_check(links_at(list, own.next).prev == number)
        links_at(list, own.next).prev = own.prev


# ---- lists of which the first and the last record are known --------------------------------------------------------

cdef inline void ends_push(List list, Ends* ends, uint32_t number) noexcept nogil:
    """Adds a record at the beginning of a list."""
    if ends.first == 0:
        ends.last = number
    list_push(list, &ends.first, number)


cdef inline void ends_append(List list, Ends* ends, uint32_t number) noexcept nogil:
    """Adds a record at the end of a list."""
    links_at(list, number)[0] = Links(0, ends.last)
    if ends.last:
        links_at(list, ends.last).next = number
    else:
        ends.first = number
    ends.last = number


cdef inline void ends_remove(List list, Ends* ends, uint32_t number) noexcept nogil:
    """Removes a record from the list that contains it."""
    cdef Links own = links_at(list, number)[0]
    list_remove(list, &ends.first, number)
    if own.next == 0:
        debug_check(ends.last == number)
        ends.last = own.prev
