# The beanstalk protocol's session.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Session
from counterd.protocols.beanstalk._listing cimport Listing
from counterd.protocols.beanstalk._replies cimport Answer, Reply
from counterd.protocols.beanstalk._wire cimport Command, Request


cdef class BeanstalkSession(Session):
    cdef Command discarding         # TOO_LONG_STILL or TOO_LONG_AT_CR while a line is discarded up to its end; else PUT
    cdef bint is_listing
    cdef Listing listing            # the list under way, if is_listing
    cdef Command sweeping           # KICK or CLEAR_TUBE, if sweep_tube is not 0
    cdef uint32_t sweep_tube        # kept from ending meanwhile
    cdef uint8_t sweep_state        # of the jobs; 0 = all that are not reserved
    cdef uint32_t sweep_left        # the most jobs that remain
    cdef uint32_t swept

    cdef Py_ssize_t parse_body(self, const uint8_t* data, size_t size, uint32_t line, Frame* frame) noexcept
    cdef Py_ssize_t parse_long(self, const uint8_t* data, size_t size, Frame* frame) noexcept
    cdef Reply refuse_line(self, Command command, const Frame* frame) noexcept
    cdef void edited(self, Command command) noexcept
    cdef int decide(self, Command command, const Request* request, const Frame* frame, Answer* answer) except -1
    cdef Reply put(self, Command command, const Request* request, const Frame* frame, Answer* answer) except *
    cdef void count_worker(self) noexcept
    cdef int reserve(self, Command command, const Request* request, Answer* answer) except -1
    cdef Reply decide_on_job(self, Command command, const Request* request, Answer* answer) except *
    cdef Reply peek(self, Command command, Answer* answer) except *
    cdef Reply decide_on_tube(self, Command command, const Request* request, Answer* answer) except *
    cdef Reply limit_reserves(self, uint32_t number, const Request* request) except *
    cdef Reply pause(self, uint32_t number, uint32_t seconds) except *
    cdef Reply answer_at_length(self, Command command, const Request* request, const Frame* frame) except *
    cdef Reply begin_jobs(self, const Request* request, const Frame* frame) except *
    cdef Reply reserve_more(self, uint32_t number, uint32_t most) except *
    cdef Reply begin_list(self, Listing listing) except *
    cdef Reply go_on_later(self) except *
    cdef Reply begin_sweep(self, Command command, const Request* request) except *
    cdef bint sweep(self) except -1
    cdef void let_go(self) noexcept
