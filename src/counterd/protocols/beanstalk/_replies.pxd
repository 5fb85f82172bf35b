# The replies of the beanstalk protocol: a word, then perhaps a number, a name, or a job with its body.
#
# Floor 2, header only.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, strlen

from counterd.engine.table cimport name_read
from counterd.protocols.beanstalk._jobs cimport Job, job_at, job_id, job_read
from counterd.protocols.beanstalk._queues cimport Queues
from counterd.protocols.beanstalk._tubes cimport Tube, tube_at
from counterd.protocols.beanstalk._wire cimport BATCH_RESERVE, CRLF_SIZE, NAME_MAX

cdef enum:
    DIGITS_MAX = 20         # of a number of 64 bits
    JOB_HEAD_MAX = 64       # bytes of the lines before a body, including JOBS, and of the CRLF after it

cdef enum Reply:
    INSERTED = 0            # and an id
    USING                   # and a name
    RESERVED_JOB            # and a job
    FOUND                   # and a job
    DELETED
    RELEASED
    BURIED_JOB
    TOUCHED
    WATCHING                # and a number
    KICKED
    KICKED_JOBS             # and a number
    PAUSED
    JOBS                    # and a number N: N replies with a job follow
    CLEARED                 # and a number
    LIMITED
    GOOD                    # the replies from here on are refusals
    NOT_FOUND = GOOD
    EXISTS                  # and a number
    NOT_IGNORED
    TIMED_OUT
    DEADLINE_SOON
    DRAINING
    EXPECTED_CRLF
    JOB_TOO_BIG
    OUT_OF_MEMORY
    INTERNAL_ERROR
    NOT_ENABLED
    BAD_FORMAT
    UNKNOWN_COMMAND
    REPLIES
    WRITTEN = REPLIES       # the reply is already in the output

cdef extern from *:
    """
    static const char *const counterd_beanstalk_words[] = {
        "INSERTED", "USING", "RESERVED", "FOUND", "DELETED", "RELEASED", "BURIED", "TOUCHED", "WATCHING", "KICKED",
        "KICKED", "PAUSED", "JOBS", "CLEARED", "LIMITED",
        "NOT_FOUND", "EXISTS", "NOT_IGNORED", "TIMED_OUT", "DEADLINE_SOON", "DRAINING",
        "EXPECTED_CRLF", "JOB_TOO_BIG", "OUT_OF_MEMORY", "INTERNAL_ERROR", "NOT_ENABLED",
        "BAD_FORMAT", "UNKNOWN_COMMAND",
    };
    """
    const char* const* REPLY_WORDS "counterd_beanstalk_words"   # in the order of Reply


cdef struct Answer:
    Reply reply
    uint64_t number         # to be written after the word; or the record of a job or tube


cdef inline uint8_t* write_word(uint8_t* target, Reply reply) noexcept nogil:
    """Writes the word of a reply. Returns the end of the word."""
    cdef size_t size = strlen(REPLY_WORDS[<int>reply])
    memcpy(target, REPLY_WORDS[<int>reply], size)
    return target + size


cdef inline uint8_t* write_number(uint8_t* target, uint64_t number) noexcept nogil:
    """Writes a blank and the number in decimal. Returns the end of the number."""
    cdef uint8_t[DIGITS_MAX] digits
    cdef int at = DIGITS_MAX
    while True:
        at -= 1
        digits[at] = <uint8_t>(<uint8_t>b"0" + number % 10)
        number //= 10
        if number == 0:
            break
    target[0] = b" "
    memcpy(target + 1, digits + at, DIGITS_MAX - at)
    return target + 1 + (DIGITS_MAX - at)


cdef inline uint8_t* write_end(uint8_t* target) noexcept nogil:
    target[0] = b"\r"
    target[1] = b"\n"
    return target + CRLF_SIZE


cdef inline uint8_t* write_job_line(uint8_t* target, const Job* job, Reply reply) noexcept nogil:
    """Writes the line before a job's body, with the id and the size: less than JOB_HEAD_MAX bytes."""
    return write_end(write_number(write_number(write_word(target, reply), job_id(job)), job.size))


cdef inline uint8_t* write_given_line(uint8_t* target, const Job* job, uint8_t command) noexcept nogil:
    """Writes the lines before the body of a job that ends a wait. Returns the end of these lines."""
    if command == BATCH_RESERVE:
        target = write_end(write_number(write_word(target, JOBS), 1))
    return write_job_line(target, job, RESERVED_JOB)


cdef inline uint8_t* write_body(uint8_t* target, const Queues* queues, const Job* job) noexcept nogil:
    job_read(&queues.jobs, job, target)
    return write_end(target + job.size)


cdef inline bint has_number(Reply reply) noexcept nogil:
    return reply == INSERTED or reply == WATCHING or reply == KICKED_JOBS or reply == JOBS or reply == CLEARED or (
        reply == EXISTS
    )


cdef inline uint8_t* write_reply(uint8_t* target, const Queues* queues, const Answer* answer) noexcept nogil:
    """Writes a reply. Returns the end of the reply."""
    cdef const Job* job
    cdef Tube* tube
    if answer.reply == RESERVED_JOB or answer.reply == FOUND:
        job = job_at(&queues.jobs, <uint32_t>answer.number)
        return write_body(write_job_line(target, job, answer.reply), queues, job)
    target = write_word(target, answer.reply)
    if answer.reply == USING:
        tube = tube_at(&queues.tubes, <uint32_t>answer.number)
        target[0] = b" "
        name_read(&queues.tubes.table, &tube.record, target + 1)
        target += 1 + tube.record.name_size
    elif has_number(answer.reply):
        target = write_number(target, answer.number)
    return write_end(target)
