"""Lists with an interface for Python, for their tests. Built by benchmarks/native/__init__.py.

They have all operations that a protocol uses, and damage(), with which tests check that the audit finds errors.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport calloc, free

from counterd.engine.audit cimport audit_list
from counterd.engine.list cimport (
    Ends, Links, List, ends_append, ends_push, ends_remove, links_at, list_push, list_remove,
)

assert sizeof(Links) == sizeof(Ends) == 8


cdef class Lists:
    """Four lists over `records` records of `stride` bytes.

    Of lists 0 and 1 only the first record is known. They use the links at `offset`. Lists 2 and 3 have Ends, and use
    the links after these. So a record can be in one of 0 and 1, and in one of 2 and 3.
    """

    cdef uint8_t* memory
    cdef Ends[4] lists
    cdef size_t stride
    cdef size_t offset
    cdef uint32_t records

    def __cinit__(self, uint32_t records, *, size_t stride=36, size_t offset=8):
        self.memory = <uint8_t*>calloc(records + 1, stride)
        if self.memory == NULL:
            raise MemoryError(f"no room for {records} records")
        self.stride = stride
        self.offset = offset
        self.records = records

    def __dealloc__(self):
        free(self.memory)

    cdef List view(self, int which):
        """Returns the view of the array with the links for a list."""
        return List(self.memory, self.stride, <Links*>(self.memory + self.offset) + which // 2)

    cdef uint32_t checked(self, uint32_t number) except 0:
        if not 0 < number <= self.records:
            raise IndexError(f"record {number} of {self.records}")
        return number

    def push(self, int which, uint32_t number):
        if which < 2:
            list_push(self.view(which), &self.lists[which].first, self.checked(number))
        else:
            ends_push(self.view(which), &self.lists[which], self.checked(number))

    def append(self, int which, uint32_t number):
        if which < 2:
            raise ValueError(f"the last record of list {which} is not known")
        ends_append(self.view(which), &self.lists[which], self.checked(number))

    def remove(self, int which, uint32_t number):
        if which < 2:
            list_remove(self.view(which), &self.lists[which].first, self.checked(number))
        else:
            ends_remove(self.view(which), &self.lists[which], self.checked(number))

    def numbers(self, int which):
        """Returns the numbers of a list's records, in its order."""
        cdef uint32_t number = self.lists[which].first
        found = []
        while number:
            found.append(number)
            number = links_at(self.view(which), number).next
        return found

    def audit(self):
        """Audits all lists and returns the length of each."""
        return [
            audit_list(
                self.view(which), self.lists[which].first, NULL if which < 2 else &self.lists[which].last, self.records
            )
            for which in range(4)
        ]

    def damage(self, int which, uint32_t number, str what, uint32_t value):
        """Overwrites a link of a record with a wrong number, or an end of the list if the number is 0."""
        cdef Links* links = links_at(self.view(which), self.checked(number)) if number else NULL
        if what == "first":
            self.lists[which].first = value
        elif what == "last":
            self.lists[which].last = value
        elif what == "next":
            links.next = value
        elif what == "prev":
            links.prev = value
        else:
            raise ValueError(what)
