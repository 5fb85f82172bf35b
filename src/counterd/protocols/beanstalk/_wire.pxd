# The wire of the beanstalk protocol: parses command lines. _replies.pxd writes replies.
#
# Floor 2, header only. Section names are those of docs/protocols/beanstalk.md. A line ends with CRLF and has at most
# LINE_MAX bytes, including the CRLF. It is parsed in two steps: `line_command` finds the command when the line is
# complete, and `line_decode` reads its arguments when it is executed.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp

cdef enum:
    LINE_MAX = 224          # bytes of a command's line, with its CRLF
    NAME_MAX = 200          # bytes of a tube's name
    BODY_MAX = 1 << 30  # bytes of a job's body, whatever the settings say
    KEPT_BODY_MAX = 1 << 28  # of a job in a journal: its row and its piece have bounds of their own
    TIMEOUT_MAX = 0x7fffffff  # seconds that a reserve may wait
    BATCH_MAX = 1000        # jobs of a batch-reserve, a list-jobs or a search-jobs
    NEEDLE_MAX = 1024       # bytes of the text of a search
    CRLF_SIZE = 2

cdef enum Command:          # in the order in which stats counts them
    PUT = 0
    PEEK
    PEEK_READY
    PEEK_DELAYED
    PEEK_BURIED
    RESERVE
    RESERVE_WITH_TIMEOUT
    RESERVE_JOB
    DELETE
    RELEASE
    USE
    WATCH
    IGNORE
    BURY
    KICK
    KICK_JOB
    TOUCH
    STATS
    STATS_JOB
    STATS_TUBE
    LIST_TUBES
    LIST_TUBE_USED
    LIST_TUBES_WATCHED
    PAUSE_TUBE
    QUIT
    # Commands that beanstalkd does not have.
    BATCH_RESERVE
    CLEAR_TUBE
    LIST_JOBS
    SEARCH_JOBS
    INSPECT_TUBE
    LIMIT_RESERVES
    PUT_UNIQUE
    PUT_LIMITED
    COMMANDS
    # Lines that are not a command.
    UNKNOWN                 # the first word is not a command
    MALFORMED               # the arguments do not fit the command
    TOO_BIG                 # a put of more bytes than a job may have: they are discarded
    TOO_LONG                # the end of a line that was too long: discarded, then answered
    TOO_LONG_STILL          # a part of such a line before its end
    TOO_LONG_AT_CR          # likewise, and its last byte may be the first half of the CRLF


cdef extern from *:
    """
    typedef struct { const char *text; size_t size; const char *arguments; } counterd_beanstalk_word;
    #define COUNTERD_WORD(text, arguments) {text, sizeof(text) - 1, arguments}
    static const counterd_beanstalk_word counterd_beanstalk_commands[] = {
        COUNTERD_WORD("put", "pdts"), COUNTERD_WORD("peek", "i"), COUNTERD_WORD("peek-ready", ""),
        COUNTERD_WORD("peek-delayed", ""), COUNTERD_WORD("peek-buried", ""), COUNTERD_WORD("reserve", ""),
        COUNTERD_WORD("reserve-with-timeout", "w"), COUNTERD_WORD("reserve-job", "i"), COUNTERD_WORD("delete", "i"),
        COUNTERD_WORD("release", "ipd"), COUNTERD_WORD("use", "n"), COUNTERD_WORD("watch", "n"),
        COUNTERD_WORD("ignore", "n"), COUNTERD_WORD("bury", "ip"), COUNTERD_WORD("kick", "c"),
        COUNTERD_WORD("kick-job", "i"), COUNTERD_WORD("touch", "i"), COUNTERD_WORD("stats", ""),
        COUNTERD_WORD("stats-job", "i"), COUNTERD_WORD("stats-tube", "n"), COUNTERD_WORD("list-tubes", ""),
        COUNTERD_WORD("list-tube-used", ""), COUNTERD_WORD("list-tubes-watched", ""), COUNTERD_WORD("pause-tube", "nd"),
        COUNTERD_WORD("quit", ""), COUNTERD_WORD("batch-reserve", "cw"), COUNTERD_WORD("clear-tube", "nq"),
        COUNTERD_WORD("list-jobs", "nqic"), COUNTERD_WORD("search-jobs", "nqics"),
        COUNTERD_WORD("inspect-tube", "n"), COUNTERD_WORD("limit-reserves", "ncm"),
        COUNTERD_WORD("put-unique", "pdtsmw"), COUNTERD_WORD("put-limited", "pdtsoxkw"),
    };
    """
    ctypedef struct Word "counterd_beanstalk_word":
        const char* text
        size_t size
        const char* arguments   # one letter for each: see line_decode
    const Word* COMMAND_WORDS "counterd_beanstalk_commands"     # in the order of Command

cdef extern from *:
    """
    typedef struct { const char *text; size_t size; unsigned char state; } counterd_beanstalk_state;
    static const counterd_beanstalk_state counterd_beanstalk_states[] = {
        {"ready", 5, 1}, {"reserved", 8, 2}, {"delayed", 7, 3}, {"buried", 6, 4}, {"all", 3, 0},
    };
    """
    ctypedef struct StateWord "counterd_beanstalk_state":
        const char* text
        size_t size
        uint8_t state           # JobState
    const StateWord* STATE_WORDS "counterd_beanstalk_states"


cdef struct Request:        # the arguments of a line
    uint64_t id
    uint32_t priority
    uint32_t delay          # seconds
    uint32_t ttr            # seconds
    uint32_t size           # bytes of the body that follows the line
    uint32_t count          # of jobs
    uint32_t timeout        # seconds to wait
    uint8_t state           # of jobs; 0 = all
    uint32_t name_size
    uint32_t other_size     # 0: there is none
    const uint8_t* name     # of a tube, or of permits
    const uint8_t* other    # of a second tube, or a key


# ---- lines ---------------------------------------------------------------------------------------------------------

cdef inline uint32_t line_size(const uint8_t* data, size_t size) noexcept nogil:
    """Returns the size of the line at `data`, including its CRLF. Returns 0 if the first `size` bytes contain no CRLF.

    A CR without a LF is an ordinary byte.
    """
    cdef const uint8_t* start = data
    cdef const uint8_t* end = data + size
    while end - start >= CRLF_SIZE:
        start = <const uint8_t*>memchr(start, b"\r", end - start - 1)
        if start == NULL:
            return 0
        if start[1] == b"\n":
            return <uint32_t>(start - data) + CRLF_SIZE
        start += 1
    return 0


cdef inline Command line_command(const uint8_t* data, uint32_t line) noexcept nogil:
    """Returns the command of a line, by its first word, or UNKNOWN. line: the bytes of the line with its CRLF."""
    cdef const uint8_t* blank = <const uint8_t*>memchr(data, b" ", line - CRLF_SIZE)
    cdef size_t size = line - CRLF_SIZE if blank == NULL else blank - data
    cdef int command
    for command in range(COMMANDS):
        if COMMAND_WORDS[command].size == size and memcmp(COMMAND_WORDS[command].text, data, size) == 0:
            return <Command>command
    return UNKNOWN


cdef inline bint is_name_byte(uint8_t byte) noexcept nogil:
    """Returns whether names may contain a byte. See section "Names"."""
    return (
        b"a" <= byte <= b"z" or b"A" <= byte <= b"Z" or b"0" <= byte <= b"9" or byte == b"-" or byte == b"+"
        or byte == b"/" or byte == b";" or byte == b"." or byte == b"$" or byte == b"_" or byte == b"(" or byte == b")"
    )


cdef inline const uint8_t* read_number(
    const uint8_t* start, const uint8_t* end, uint64_t most, uint64_t* number
) noexcept nogil:
    """Reads decimal digits.

    Returns the end of the digits, or NULL if there are none or the number is larger than `most`.
    """
    cdef const uint8_t* at = start
    cdef uint64_t value = 0
    cdef uint8_t digit
    while at < end and b"0" <= at[0] <= b"9":
        digit = at[0] - <uint8_t>b"0"
        if value > (most - digit) // 10:
            return NULL
        value = 10 * value + digit
        at += 1
    number[0] = value
    return at if at > start else NULL


cdef inline const uint8_t* read_word(const uint8_t* start, const uint8_t* end, uint8_t other) noexcept nogil:
    """Reads a name that may also contain the byte `other`.

    Returns the end of the name, or NULL if the name is not valid.
    """
    cdef const uint8_t* at = start
    while at < end and (is_name_byte(at[0]) or at[0] == other):
        at += 1
    return NULL if at == start or at - start > NAME_MAX or start[0] == b"-" else at


cdef inline const uint8_t* read_name(const uint8_t* start, const uint8_t* end) noexcept nogil:
    """Reads the name of a tube or a key. Returns the end of the name, or NULL if the name is not valid."""
    return read_word(start, end, b"-")


cdef inline const uint8_t* read_counter(const uint8_t* start, const uint8_t* end) noexcept nogil:
    """Reads the name of a counter, which may contain colons. Returns the end of the name, or NULL."""
    return read_word(start, end, b":")


cdef inline const uint8_t* read_state(const uint8_t* start, const uint8_t* end, uint8_t* state) noexcept nogil:
    """Reads the state of jobs, or "all". Returns the end of the word, or NULL if it is not valid."""
    cdef const StateWord* word
    cdef int i
    for i in range(5):
        word = STATE_WORDS + i
        if <size_t>(end - start) >= word.size and memcmp(start, word.text, word.size) == 0:
            state[0] = word.state
            return start + word.size
    return NULL


cdef inline bint line_decode(
    const uint8_t* start, const uint8_t* end, const char* arguments, Request* request
) noexcept nogil:
    """Reads the arguments of a command, each after at least one blank.

    Returns False if the arguments do not match the command's Word.
    """
    cdef const uint8_t* word
    cdef uint64_t number = 0
    cdef char kind
    while arguments[0]:
        kind = arguments[0]
        arguments += 1
        if start == end or start[0] != b" ":
            request.other_size = 0
            return start == end and kind == b"k"    # which may be missing, with all that follows it
        while start < end and start[0] == b" ":
            start += 1
        word = start
        if kind == b"n" or kind == b"m" or kind == b"k":
            start = read_name(start, end)
        elif kind == b"o":
            start = read_counter(start, end)
        elif kind == b"q":
            start = read_state(start, end, &request.state)
        else:
            start = read_number(start, end, number_max(kind), &number)
        if start == NULL:
            return False
        if kind == b"n" or kind == b"o":
            request.name, request.name_size = word, <uint32_t>(start - word)
        elif kind == b"m" or kind == b"k":
            request.other, request.other_size = word, <uint32_t>(start - word)
        elif kind == b"i":
            request.id = number
        elif kind == b"p":
            request.priority = <uint32_t>number
        elif kind == b"d":
            request.delay = <uint32_t>number
        elif kind == b"t":
            request.ttr = <uint32_t>number
        elif kind == b"s":
            request.size = <uint32_t>number
        elif kind == b"w":
            request.timeout = <uint32_t>number
        elif kind == b"c":
            request.count = <uint32_t>number
        elif kind == b"x":      # not 0
            request.count = <uint32_t>number
            if number == 0:
                return False
    return start == end


cdef inline uint64_t number_max(char kind) noexcept nogil:
    """Returns the largest number allowed for an argument of a kind."""
    if kind == b"i":
        return 0xffffffffffffffff
    return <uint64_t>TIMEOUT_MAX if kind == b"w" else 0xffffffff
