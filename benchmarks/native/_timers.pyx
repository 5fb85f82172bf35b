"""The wheel of timers with an interface for Python, for its tests. Built by benchmarks/native/__init__.py.

It has all operations that a protocol uses, and damage(), with which tests check that the audit finds errors.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free

from counterd.engine.audit cimport audit_timers
from counterd.engine.wheel cimport (
    Timer, Timers, Wheel, timer_at, timer_is_armed, timers_arm, timers_disarm, timers_next_ns, timers_take,
)

assert sizeof(Timer) == 16


cdef class Wheelwork:
    """A wheel with `records` records of `stride` bytes, each with a timer at `offset`."""

    cdef Timers timers
    cdef uint8_t* memory
    cdef readonly uint32_t records

    def __cinit__(self, uint32_t records, *, size_t stride=96, size_t offset=40):
        if stride % 8 or offset % 8 or offset + sizeof(Timer) > stride:
            raise ValueError(f"no timer fits at {offset} of {stride} bytes")
        self.memory = <uint8_t*>calloc(1, sizeof(Wheel) + stride * (<size_t>records + 1))
        if self.memory == NULL:
            raise MemoryError(f"no room for {records} records")
        self.timers.wheel = <Wheel*>self.memory
        self.timers.base = self.memory + sizeof(Wheel) + offset
        self.timers.stride = stride
        self.records = records

    def __dealloc__(self):
        free(self.memory)

    cdef uint32_t checked(self, uint32_t number) except 0:
        if not 0 < number <= self.records:
            raise IndexError(f"record {number} of {self.records}")
        return number

    def arm(self, uint32_t number, int64_t due_ns):
        timers_arm(&self.timers, self.checked(number), due_ns)

    def disarm(self, uint32_t number):
        timers_disarm(&self.timers, self.checked(number))

    def is_armed(self, uint32_t number):
        return timer_is_armed(timer_at(&self.timers, self.checked(number)))

    def next_ns(self):
        return timers_next_ns(&self.timers)

    def take(self, int64_t now_ns, int steps):
        """Returns the due records that at most `steps` steps find, and the number of steps left."""
        cdef uint32_t number
        taken = []
        while number := timers_take(&self.timers, now_ns, &steps):
            taken.append(number)
        return taken, steps

    def audit(self):
        audit_timers(&self.timers, self.records)

    def damage(self, uint32_t number, str what, uint32_t value):
        """Overwrites a field of the timer or the wheel with a wrong value."""
        cdef Timer* timer = timer_at(&self.timers, self.checked(number))
        cdef Wheel* wheel = self.timers.wheel
        if what == "next":
            timer.next = value
        elif what == "prev":
            timer.prev = value
        elif what == "due_ns":
            timer.due_ns = value
        elif what == "armed":
            wheel.armed = value
        elif what == "elapsed":
            wheel.elapsed = value
        elif what == "cascading":
            wheel.cascading = value
        elif what == "occupied":
            wheel.occupied[value] ^= 1
        else:
            raise ValueError(what)

    @property
    def armed(self):
        return self.timers.wheel.armed

    @property
    def elapsed(self):
        return self.timers.wheel.elapsed

    @property
    def wheel_size(self):
        return sizeof(Wheel)
