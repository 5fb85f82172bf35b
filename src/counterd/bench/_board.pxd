# What load processes write while they run and their parent reads: one shared mapping, no locks.
#
# Floor 5. Each process has a Sheet of its own, which only it writes; the parent may see a sheet mid-change, and reads
# it again when all is over. What the parent says goes through the Orders, which only it writes. Of `grants` each
# process writes those of its own connections. `held` is everybody's, and is changed by atomic additions alone; but
# where it is about jobs, each process writes what it knows of its own.

from cpython.bytes cimport PyBytes_AS_STRING
from libc.errno cimport ECONNREFUSED, ECONNRESET, EMFILE, ENFILE, EPIPE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd.bench._words cimport OUTCOMES

cdef extern from *:
    int count_leading_zeros "__builtin_clzll"(uint64_t value) noexcept nogil

cdef enum:
    # HdrHistogram's layout for 1 ns to an hour at 3 significant digits: its library can read what is counted here
    SUB_BUCKETS = 2048
    BUCKETS = 32
    COUNTS = (BUCKETS + 1) * SUB_BUCKETS // 2
    HIGHEST = 3600000000000
    EVIDENCE = 256          # bytes of text
    TOKEN_PLACES = 1 << 20  # of tokens that were told lately; a power of two

cdef enum ErrorKind:
    NOT_LISTENING           # refused
    RESET
    CLOSED                  # by the server
    DESCRIPTORS             # over the limit of open files
    NETWORK                 # anything else that a socket says
    WRONG_ANSWER
    ERROR_REPLY
    UNANSWERED              # requests that were under way when their connection broke, or still at the end
    NOT_GIVEN_BACK
    ERROR_KINDS

cdef enum Stage:
    CONNECTING
    FILLING
    READY
    RUNNING
    OVER                    # all answered, connections still open
    GONE

cdef enum Known:            # of a job
    SENT = 1                # its put was
    STORED = 2              # and answered: the job is there
    OUT = 4                 # it was delivered to a connection that is open
    ENDING = 8              # its delete was sent

cdef enum Kind:
    LATENCY
    SERVICE
    GIVE_BACK
    QUEUE
    KINDS


cdef struct Sheet:
    int64_t stage
    int64_t connected       # connections that are open
    int64_t filled          # names that are known to exist
    int64_t requests        # answered, of the measured time
    int64_t late
    int64_t unsent
    int64_t last_ns         # of the last answer
    int64_t cpu_ns          # used in the measured time
    int64_t violations
    int64_t outcomes[OUTCOMES]
    int64_t errors[ERROR_KINDS]
    char evidence[EVIDENCE]  # of the first wrong answer, error reply or network error
    char violation[EVIDENCE]  # the first name that was seen above its maximum, or token that was told twice
    uint64_t counts[KINDS][COUNTS]


cdef struct Orders:
    int64_t start_ns        # 0 = wait
    int64_t measure_ns      # requests meant for this instant or later are measured
    int64_t end_ns          # no request is meant for a later one
    int64_t stop            # when to end early, 0 = not
    int64_t leave           # close the connections


cdef inline ErrorKind error_kind(int error) noexcept nogil:
    """Returns the kind of a socket's error. 0 means the end of the stream."""
    if error == 0:
        return CLOSED
    if error == ECONNREFUSED:
        return NOT_LISTENING
    if error == ECONNRESET or error == EPIPE:
        return RESET
    return DESCRIPTORS if error == EMFILE or error == ENFILE else NETWORK


cdef inline int text_write(char* target, str text) except -1:
    """Writes a text into a sheet, as far as there is room. A sheet keeps its first text."""
    if target[0]:
        return 0
    data = text.encode()[: EVIDENCE - 1]
    memcpy(target, PyBytes_AS_STRING(data), len(data))
    return 0


cdef inline void histogram_record(uint64_t* counts, int64_t value) noexcept nogil:
    cdef int bucket
    if value < 0:
        value = 0
    elif value > <int64_t>HIGHEST:
        value = <int64_t>HIGHEST
    bucket = 53 - count_leading_zeros(<uint64_t>value | (SUB_BUCKETS - 1))
    counts[bucket * (SUB_BUCKETS // 2) + (value >> bucket)] += 1


cdef class Board:
    cdef Orders* orders
    cdef Sheet* sheets
    cdef int64_t* held      # permits that are surely held, by name; or what is Known of jobs; NULL = nobody verifies
    cdef uint64_t* grants   # in the measured time, of each connection; all of the first process, then the next
    cdef uint32_t connections
    cdef uint64_t* tokens   # that were told lately, by what they hash to; NULL = nobody verifies, or there are none
    cdef uint64_t token_places
    cdef readonly int processes
    cdef uint32_t names
    cdef size_t size
    cdef uint64_t* taken    # the parent's copy of what it has already taken, KINDS * COUNTS a process
