"""Pieces of the journal: rows of jobs on their way to the journal and back.

Floor 2 (ARCHITECTURE.md). The store puts its changes into pieces. A piece follows when the previous piece is on disk. A
job that has changed twice since the previous piece has one row; a job that was put and deleted since then has none.
journal.py, in another process, writes the rows of a piece to a database, and makes pieces from the database after a
restart.

A piece is a Head, followed by rows. A row is a Row, followed by the name of its tube, its key and, if the row is WHOLE,
its requirement and its body. Numbers have the byte order of the machine, because a piece is never stored.
"""

from zlib import crc32

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd.engine.chains cimport chain_blocks
from counterd.engine.connections cimport connections_take
from counterd.engine.pool cimport pool_left
from counterd.engine.table cimport name_blocks, name_read, name_tag
from counterd.protocols.beanstalk._groups cimport GROUP_HEAD, group_of, permits_name
from counterd.protocols.beanstalk._jobs cimport (
    BURIED, DELAYED, READY, RESERVED, Job, Jobs, JobState, job_at, job_find, job_id, job_is_ended, job_next_changed,
    job_number, job_place, job_read,
)
from counterd.protocols.beanstalk._keys cimport (
    Key, Keys, key_at, key_end_at, key_find, key_join, key_let_go, key_make,
)
from counterd.protocols.beanstalk._queues cimport job_enter, job_hold, seconds_ns, tube_expect
from counterd.protocols.beanstalk._store cimport ID_BLOCK, PIECE_SIZE, BeanstalkStore, journal_fail, journal_fill
from counterd.protocols.beanstalk._tubes cimport tube_at, tube_find, tube_make, tubes_have_room
from counterd.protocols.beanstalk._wire cimport KEPT_BODY_MAX, read_counter, read_name

cdef enum:
    CHANGES_MAX = 4096          # changes in a piece
    WASTE_MAX = 2200            # bytes that a body in its own table can take, besides itself

cdef enum RowKind:
    GONE = 0                    # the job has ended: only id and size are used; if it has a key, it is also a KEY
    CHANGED = 1                 # the journal has its body already
    WHOLE = 2
    LIMIT = 3                   # of a tube: its name; `priority` is the number of reserves, the body a tube's name
    KEY = 4                     # the key of an ended job: its id and the key; `due` is when the key becomes free


# The highest id of a job: the end of the block after it must fit into the database's integers.
cdef uint64_t ID_MAX = <uint64_t>INT64_MAX - ID_BLOCK

assert GROUP_HEAD == sizeof(uint32_t)   # so that a requirement takes as many bytes as the name of its group

CONSTANTS = {  # for journal.py, and tests
    "ID_BLOCK": ID_BLOCK, "ID_MAX": ID_MAX, "CHANGES_MAX": CHANGES_MAX, "KEPT_BODY_MAX": KEPT_BODY_MAX,
    "PIECE_SIZE": PIECE_SIZE,
}


cdef packed struct Head:
    uint64_t position           # of the last change in it
    int64_t now                 # Unix time in nanoseconds
    uint64_t id_limit           # ids up to this one may be used when the piece is on disk


cdef packed struct Row:         # times are Unix times in nanoseconds
    uint64_t id
    int64_t created
    int64_t since               # when it entered its state
    int64_t due                 # if DELAYED or RESERVED: when that ends
    uint32_t priority
    uint32_t delay
    uint32_t ttr
    uint32_t reserves
    uint32_t timeouts
    uint32_t releases
    uint32_t buries
    uint32_t kicks
    uint32_t keep               # seconds for which the key stays taken after the end of the job
    uint32_t size               # of the body
    uint8_t kind
    uint8_t state
    uint8_t name_size
    uint8_t key_size
    uint8_t requirement_size    # 4 bytes for the maximum, and the name of the permits; 0: it has no requirement


# ---- in the daemon -------------------------------------------------------------------------------------------------

cdef inline int64_t unix_ns(BeanstalkStore store, int64_t ns) noexcept:
    """Converts a time of the store's clock to Unix time.

    A time before 1970, which a wrong clock can cause, becomes 0.
    """
    return max(0, ns + store.wall_ns)


cdef inline uint8_t* write_row(BeanstalkStore store, uint8_t* target, const Job* job) except NULL:
    """Writes the row of a job. Returns the end of the row."""
    cdef const Keys* keys = &store.queues.keys
    cdef Key* key = key_at(keys, job.key) if job.key else NULL
    cdef uint32_t number
    cdef bytes name, requirement
    cdef Row row
    memset(&row, 0, sizeof(Row))
    row.id = job_id(job)
    row.size = job.size
    if key != NULL and (job_is_ended(job) or not job.is_written):
        row.key_size = <uint8_t>key.record.name_size
        row.keep = key.keep
    if job_is_ended(job):
        row.due = unix_ns(store, key.until_ns) if key != NULL else 0
        memcpy(target, &row, sizeof(Row))
        return write_key(keys, key, target + sizeof(Row))
    row.kind = CHANGED if job.is_written else WHOLE
    row.state = job.state
    row.created = unix_ns(store, job.created_ns)
    row.since = unix_ns(store, job.since_ns)
    if job.state == DELAYED or job.state == RESERVED:
        row.due = unix_ns(store, <int64_t>job.node.key)
    row.priority = job.priority
    row.delay = job.delay
    row.ttr = job.ttr
    row.reserves = job.reserves
    row.timeouts = job.timeouts
    row.releases = job.releases
    row.buries = job.buries
    row.kicks = job.kicks
    row.name_size = <uint8_t>tube_at(&store.queues.tubes, job.tube).record.name_size
    if row.kind == WHOLE and job.is_limited:
        number = job_number(&store.queues.jobs, job)
        name = permits_name(&store.queues.groups, group_of(&store.queues.groups, number))
        requirement = requirement_bytes(store.queues.groups.requirements[number].maximum, name)
        row.requirement_size = <uint8_t>PyBytes_GET_SIZE(requirement)
    memcpy(target, &row, sizeof(Row))
    target += sizeof(Row)
    name_read(&store.queues.tubes.table, &tube_at(&store.queues.tubes, job.tube).record, target)
    target += row.name_size
    if row.kind == WHOLE:
        target = write_key(keys, key, target)
        if job.is_limited:
            memcpy(target, PyBytes_AS_STRING(requirement), row.requirement_size)
            target += row.requirement_size
        job_read(&store.queues.jobs, job, target)
        target += job.size
    return target


cdef inline bytes requirement_bytes(uint32_t maximum, bytes name):
    return (<const uint8_t*>&maximum)[:sizeof(uint32_t)] + name


cdef inline uint32_t requirement_maximum(const uint8_t* requirement) noexcept:
    cdef uint32_t maximum
    memcpy(&maximum, requirement, sizeof(uint32_t))
    return maximum


cdef inline uint8_t* write_key(const Keys* keys, Key* key, uint8_t* target) noexcept:
    """Writes a key. Writes nothing if the key is NULL. Returns the end of the key."""
    if key == NULL:
        return target
    name_read(&keys.table, &key.record, target)
    return target + key.record.name_size


cdef inline size_t row_size(BeanstalkStore store, const Job* job) noexcept:
    """Returns the size of a job's row in bytes.

    Returns 0 if the job needs no row, because it was put and deleted since the last piece.
    """
    cdef size_t key_size = key_at(&store.queues.keys, job.key).record.name_size if job.key else 0
    cdef size_t size = sizeof(Row)
    if job_is_ended(job):
        return size + key_size if job.is_written or key_size else 0
    size += tube_at(&store.queues.tubes, job.tube).record.name_size
    if job.is_written:
        return size
    if job.is_limited:
        size += group_of(&store.queues.groups, job_number(&store.queues.jobs, job)).record.name_size
    return size + key_size + job.size


cdef bytes limit_row(tuple limit):
    """Makes the row of an item of BeanstalkStore.limits."""
    cdef Row row
    _, name, reserves_max, target = limit
    memset(&row, 0, sizeof(Row))
    row.kind = LIMIT
    row.priority = reserves_max
    row.name_size = <uint8_t>len(name)
    row.size = len(target)
    return (<const uint8_t*>&row)[:sizeof(Row)] + name + target


def take(BeanstalkStore store not None, int64_t now_ns):
    """Returns a position and the piece with the changes since the last piece.

    Returns None if nothing has to be written to the journal yet.
    """
    cdef Jobs* jobs = &store.queues.jobs
    cdef size_t size = sizeof(Head), row
    cdef uint32_t number, jobs_told = 0, rows = 0, _i
    cdef const Job* job
    cdef uint64_t position = store.state.changes_taken
    cdef list limits = []
    cdef Head head
    cdef bytes piece
    cdef uint8_t* target
    with store.at(now_ns):
        if store.journal_due_ns() > now_ns:
            return None
        number = jobs.state.changed_first
        while size < PIECE_SIZE and position < store.state.changes_taken + CHANGES_MAX:
            position += 1
            if len(limits) < len(store.limits) and store.limits[len(limits)][0] == position:
                limits.append(limit_row(store.limits[len(limits)]))
                row = len(limits[len(limits) - 1])
            elif number:
                row = row_size(store, job_at(jobs, number))
                number = job_at(jobs, number).next_changed
                jobs_told += 1
            else:
                position -= 1
                break
            size += row
            rows += row != 0
        piece = PyBytes_FromStringAndSize(NULL, size)
        target = <uint8_t*>PyBytes_AS_STRING(piece)
        store.state.changes_taken = position
        store.state.records_written += rows
        if jobs.state.id_limit - jobs.state.last_id < ID_BLOCK // 2:
            store.state.id_limit_asked = jobs.state.last_id + ID_BLOCK
        head = Head(store.state.changes_taken, now_ns + store.wall_ns, store.state.id_limit_asked)
        memcpy(target, &head, sizeof(Head))
        target += sizeof(Head)
        for _i in range(jobs_told):
            number = jobs.state.changed_first
            job = job_at(jobs, number)
            if row_size(store, job):
                target = write_row(store, target, job)
            if job_is_ended(job) and job.key:
                key_let_go(&store.queues.keys, jobs, job.key)
            job_next_changed(jobs)
        for limit in limits:
            memcpy(target, PyBytes_AS_STRING(limit), len(limit))
            target += len(limit)
        del store.limits[:len(limits)]
        store.state.sent_ns, store.state.sent_size = now_ns, size
        if jobs.state.changed_first == 0 and not store.limits:
            store.state.taken_ns = now_ns
    return head.position, piece


def hurry(BeanstalkStore store not None):
    """Makes all later changes due immediately."""
    store.journal_period_ns = 0


def refuse(BeanstalkStore store not None, int64_t now_ns):
    """Called when the journal cannot be written.

    Refuses all requests that change what is in the journal, until reach() is called. See section "The journal".
    """
    with store.at(now_ns):
        store.state.is_failing = True
        journal_fail(store)


def fill(BeanstalkStore store not None, bint is_full, int64_t now_ns):
    """Called when the journal has no more room, and when it has room again.

    Refuses requests that need more room, among them those whose replies wait for the journal. All others are served.
    """
    with store.at(now_ns):
        store.state.is_full = is_full
        store.state.refusing = store.state.refused = 0
        if is_full:
            journal_fill(store)


def renew(BeanstalkStore store not None, bytes piece not None, int64_t now_ns):
    """Returns a piece that was not written, without the jobs that have ended since, because their puts were refused.

    Returns None while there are still puts to refuse.
    """
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(piece)
    cdef const uint8_t* end = data + PyBytes_GET_SIZE(piece)
    cdef const uint8_t* start
    cdef list kept = [data[:sizeof(Head)]]
    cdef Row row
    data += sizeof(Head)
    with store.at(now_ns):
        if store.awaiting_journal and (
            store.state.is_failing or store.state.is_full and store.state.refusing < <size_t>len(store.awaiting_journal)
        ):
            return None
        while data < end:
            start = data
            data = row_end(data, &row)
            if row.kind != WHOLE or job_find(&store.queues.jobs, row.id):
                kept.append(start[:data - start])
    return b"".join(kept)


def end(BeanstalkStore store not None):
    """Stops using new ids. Returns the last id that was used."""
    with store:
        store.queues.jobs.state.id_limit = store.queues.jobs.state.last_id
        return {"last_id": store.queues.jobs.state.last_id}


def begin(BeanstalkStore store not None, uint64_t last_id, uint64_t id_limit):
    """Records all later changes.

    last_id: the highest id that may have been used. id_limit: the highest id that may be used.
    """
    with store:
        store.queues.jobs.state.last_id = last_id
        store.queues.jobs.state.id_limit = store.state.id_limit_asked = id_limit
        store.queues.jobs.state.is_journaled = True


def restore(BeanstalkStore store not None, bytes piece not None, int64_t now_ns):
    """Restores the jobs of a piece, in the order in which they entered their states. Returns the number of jobs.

    Called before begin(). Raises ValueError if a row is invalid, and MemoryError if there is no room.
    """
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(piece)
    cdef const uint8_t* end = data + PyBytes_GET_SIZE(piece)
    cdef Row row
    cdef int count = 0
    with store.at(now_ns):
        if store.state.lost_worker == 0:
            store.state.lost_worker = connections_take(&store.connections)
        data += sizeof(Head)
        while data < end:
            memcpy(&row, data, sizeof(Row))
            data += sizeof(Row)
            if row.kind == LIMIT:
                restore_limit(store, &row, data)
            elif row.kind == KEY:
                restore_key(store, &row, data)
            else:
                restore_job(store, &row, data)
                count += 1
            data += row.name_size + row.key_size + row.requirement_size + row.size
        store.expect(0)
    return count


cdef uint32_t restore_tube(BeanstalkStore store, const uint8_t* name, uint32_t size) except 0:
    """Returns the tube with this name. Makes the tube if it does not exist."""
    cdef uint32_t tag = name_tag(&store.queues.tubes.table, name, size)
    cdef uint32_t number = tube_find(&store.queues.tubes, tag, name, size)
    if number == 0:
        if not tubes_have_room(&store.queues.tubes, size):
            raise MemoryError("there are more tubes than beanstalk.max_tubes and beanstalk.memory_limit allow")
        number = tube_make(&store.queues.tubes, tag, name, size)
    return number


cdef int restore_limit(BeanstalkStore store, const Row* row, const uint8_t* data) except -1:
    """Restores the limit of reserves of a tube.

    data: the name of the tube, then the name of the tube for retired jobs.
    """
    cdef uint32_t number = restore_tube(store, data, row.name_size)
    cdef uint32_t target = 0
    if row.size:
        tube_at(&store.queues.tubes, number).walks += 1
        target = restore_tube(store, data + row.name_size, row.size)
        tube_at(&store.queues.tubes, number).walks -= 1
    return store.limit_reserves(number, row.priority, target)


cdef uint32_t restore_key(BeanstalkStore store, const Row* row, const uint8_t* name) except? 0xffffffff:
    """Restores a key. Returns 0 if the key belonged to a job that has ended and is free by now, or if a later job has
    the key.

    If the clock was set back meanwhile, the old key can seem to be taken although a later job has it.
    """
    cdef Keys* keys = &store.queues.keys
    cdef int64_t until_ns = min(row.due - store.wall_ns, store.now_ns + seconds_ns(row.keep))
    cdef uint32_t tag, number
    if row.kind == KEY and until_ns <= store.now_ns:
        return 0
    tag = name_tag(&keys.table, name, row.key_size)
    if key_find(keys, &store.queues.jobs, tag, name, row.key_size, store.now_ns):
        if row.kind == KEY:
            return 0
        raise ValueError(f"key {name[:row.key_size].decode()} occurs twice")
    if pool_left(keys.table.pool) == 0 or pool_left(store.chains.pool) < name_blocks(&keys.table, row.key_size):
        raise MemoryError("there are more keys than beanstalk.memory_limit allows")
    number = key_make(keys, tag, name, row.key_size, row.id, row.keep)
    if row.kind == KEY:
        key_end_at(keys, number, until_ns)
    return number


cdef int restore_job(BeanstalkStore store, const Row* row, const uint8_t* data) except -1:
    """Restores a job. data: the name of its tube, its key, its requirement, and its body.

    The clock may have been set back meanwhile. So no start is later than now, and no remaining time is longer than the
    job's delay or time to run.
    """
    cdef uint32_t tube, number, key = 0
    cdef int64_t since_ns = min(row.since - store.wall_ns, store.now_ns)
    cdef int64_t longest_ns = seconds_ns(row.delay if row.state == DELAYED else row.ttr)
    cdef int64_t due_ns = max(1, min(row.due - store.wall_ns, store.now_ns + longest_ns))
    cdef const uint8_t* requirement
    cdef uint32_t maximum, name_size
    cdef Job* job
    if row.requirement_size and store.lender is None:
        raise ValueError(f"job {row.id} needs a permit, but no enabled protocol has permits (counter.enable)")
    if job_find(&store.queues.jobs, row.id):
        raise ValueError(f"job {row.id} occurs twice")
    if row.size > store.job_size_max:  # it would not fit into the buffer for replies
        raise MemoryError(f"job {row.id} has {row.size} bytes, more than beanstalk.max_job_size allows")
    tube = restore_tube(store, data, row.name_size)
    data += row.name_size
    if row.key_size:
        key = restore_key(store, row, data)
    requirement = data + row.key_size
    data = requirement + row.requirement_size
    if pool_left(store.queues.jobs.pool) == 0 or pool_left(store.chains.pool) < chain_blocks(row.size):
        raise MemoryError("there are more jobs than beanstalk.memory_limit allows")
    if row.requirement_size and (
        pool_left(store.queues.groups.table.pool) == 0 or pool_left(store.chains.pool)
        < chain_blocks(row.size) + name_blocks(&store.queues.groups.table, row.requirement_size)
    ):
        raise MemoryError("there are more jobs with permits than beanstalk.memory_limit allows")
    number = job_place(&store.queues.jobs, row.id, tube, data, row.size)
    if key:
        key_join(&store.queues.keys, &store.queues.jobs, key, number)
    if row.requirement_size:
        maximum = requirement_maximum(requirement)
        name_size = row.requirement_size - <uint32_t>sizeof(uint32_t)
        requirement += sizeof(uint32_t)
        store.add_requirement(number, requirement, name_size, maximum)
    job = job_at(&store.queues.jobs, number)
    job.is_written = True
    job.priority = row.priority
    job.delay = row.delay
    job.ttr = row.ttr
    job.created_ns = min(row.created - store.wall_ns, store.now_ns)
    job.reserves = row.reserves
    job.timeouts = row.timeouts
    job.releases = row.releases
    job.buries = row.buries
    job.kicks = row.kicks
    if row.state == RESERVED:
        job_hold(&store.queues, number, store.state.lost_worker, due_ns, since_ns)
        if job.is_limited and not store.lender.retake(requirement[:name_size], maximum, store.now_ns):
            raise MemoryError(f"there is no room for the permit of job {row.id}")
    else:
        job_enter(
            &store.queues, number, <JobState>row.state, due_ns if row.state == DELAYED else row.priority, since_ns
        )
    if row.state == DELAYED:
        tube_expect(&store.queues, tube, due_ns)
    return 0


cdef inline const uint8_t* row_end(const uint8_t* data, Row* row) noexcept:
    """Reads a row. Returns its end."""
    memcpy(row, data, sizeof(Row))
    data += sizeof(Row) + row.name_size + row.key_size + row.requirement_size
    return data + row.size if row.kind == WHOLE or row.kind == LIMIT else data


# ---- in the writer process -----------------------------------------------------------------------------------------

def growth(bytes piece not None, uint32_t inline_max):
    """Returns how many bytes a piece adds to the database at most: see section "Size" of docs/operations.md."""
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(piece)
    cdef const uint8_t* end = data + PyBytes_GET_SIZE(piece)
    cdef uint64_t size = 0
    cdef Row row
    data += sizeof(Head)
    while data < end:
        data = row_end(data, &row)
        if row.kind == WHOLE:
            size += sizeof(Row) + row.size + (WASTE_MAX if row.size > inline_max else 0)
        elif row.kind == LIMIT:
            size += sizeof(Row)
    return size


def split(bytes piece not None, size_t rows_max):
    """Splits a piece into pieces of at most rows_max rows that can be written one after the other: first the rows of
    ended jobs, then those of changed jobs, then those of new jobs.
    """
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(piece)
    cdef const uint8_t* end = data + PyBytes_GET_SIZE(piece)
    cdef const uint8_t* start
    cdef bytes head = data[:sizeof(Head)]
    cdef tuple kinds = ([], [], [])
    cdef Row row
    data += sizeof(Head)
    while data < end:
        start = data
        data = row_end(data, &row)
        kinds[0 if row.kind == GONE else 2 if row.kind == WHOLE else 1].append(start[:data - start])
    return [
        head + b"".join(one[first:first + rows_max]) for one in kinds for first in range(0, len(one), rows_max)
    ] or [head]


def rows(bytes piece not None, uint32_t inline_max):
    """Parses a piece into (now, id_limit, whole, bodies, changed, gone, limits, keys):

    whole    (id, tube, state, priority, delay, ttr, created, since, due, reserves, timeouts, releases, buries, kicks,
             key or None, keep, CRC-32 of the body, body, permits or None, maximum or None) of jobs that the
             journal does not have yet
    bodies   (id, body) of those jobs whose body is longer than inline_max: in `whole` it is None
    changed  as whole from tube to kicks, then the id
    gone     (id, bytes of its body)
    limits   (tube, reserves, name of another tube or "")
    keys     (key, id, Unix time when it becomes free, seconds from the end of the job to then) of ended jobs
    """
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(piece)
    cdef const uint8_t* end = data + PyBytes_GET_SIZE(piece)
    cdef Head head
    cdef Row row
    cdef list whole = [], bodies = [], changed = [], gone = [], limits = [], keys = []
    memcpy(&head, data, sizeof(Head))
    data += sizeof(Head)
    while data < end:
        memcpy(&row, data, sizeof(Row))
        data += sizeof(Row)
        if row.kind == GONE or row.kind == KEY:
            if row.kind == GONE:
                gone.append((row.id, row.size))
            if row.key_size:
                keys.append((data[:row.key_size].decode(), row.id, row.due, row.keep))
            data += row.key_size
            continue
        tube = data[:row.name_size].decode()
        data += row.name_size
        if row.kind == LIMIT:
            limits.append((tube, row.priority, data[:row.size].decode()))
            data += row.size
            continue
        if row.kind == CHANGED:
            changed.append((
                tube, row.state, row.priority, row.delay, row.ttr, row.created, row.since, row.due, row.reserves,
                row.timeouts, row.releases, row.buries, row.kicks, row.id,
            ))
            continue
        key = data[:row.key_size].decode() if row.key_size else None
        data += row.key_size
        permits = maximum = None
        if row.requirement_size:
            permits = data[sizeof(uint32_t):row.requirement_size].decode()
            maximum = requirement_maximum(data)
        data += row.requirement_size
        body = data[:row.size]
        data += row.size
        checksum = crc32(body)
        if row.size > inline_max:
            bodies.append((row.id, body))
            body = None
        whole.append((
            row.id, tube, row.state, row.priority, row.delay, row.ttr, row.created, row.since, row.due, row.reserves,
            row.timeouts, row.releases, row.buries, row.kicks, key, row.keep, checksum, body, permits, maximum,
        ))
    return head.now, head.id_limit, whole, bodies, changed, gone, limits, keys


cdef bint is_name(bytes name):
    """Returns whether the bytes are a valid name of a tube or key."""
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(name)
    cdef const uint8_t* end = start + PyBytes_GET_SIZE(name)
    return read_name(start, end) == end


cdef bint is_counter(bytes name):
    """Returns True for a valid name of a counter of jobs."""
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(name)
    cdef const uint8_t* end = start + PyBytes_GET_SIZE(name)
    return read_counter(start, end) == end


def packed_keys(list keys not None):
    """Makes a piece from rows in the form of `keys` of rows(). Raises ValueError for an invalid row."""
    cdef list pieces = [b"\0" * sizeof(Head)]
    cdef Row row
    memset(&row, 0, sizeof(Row))
    row.kind = KEY
    for key, id_, until, keep in keys:
        try:
            name = key.encode()
            row.id, row.due, row.keep = id_, until, keep
            if not is_name(name) or not 0 < row.id <= ID_MAX or row.due < 0:
                raise ValueError("its name, id or time is impossible")
            row.key_size = <uint8_t>len(name)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"key {key}: {error}") from None
        pieces.append((<const uint8_t*>&row)[:sizeof(Row)] + name)
    return b"".join(pieces)


def packed_limits(list limits not None):
    """Makes a piece from rows in the form of `limits` of rows(). Raises ValueError for an invalid row."""
    cdef list pieces = [b"\0" * sizeof(Head)]
    for tube, reserves_max, target in limits:
        try:
            names = [name.encode() for name in (tube, target)]
            if not is_name(names[0]) or target and not is_name(names[1]) or reserves_max == 0:
                raise ValueError("its names or its number are impossible")
            pieces.append(limit_row((0, names[0], reserves_max, names[1])))
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"the limit of tube {tube}: {error}") from None
    return b"".join(pieces)


def packed(list jobs not None, uint64_t id_limit=0):
    """Makes a piece from rows in the form of `whole` of rows(), but without the checksum. Raises ValueError, with the
    id of the job, for an invalid row.
    """
    if id_limit > ID_MAX:
        raise ValueError(f"the last id cannot be {id_limit}")
    cdef Head head = Head(0, 0, id_limit)
    cdef list pieces = [(<const uint8_t*>&head)[:sizeof(Head)]]
    cdef Row row
    cdef str tube, key, permits
    cdef bytes name, body, name_of_key, name_of_permits, requirement
    cdef uint32_t maximum
    for job in jobs:
        try:
            (
                row.id, tube, row.state, row.priority, row.delay, row.ttr, row.created, row.since, row.due,
                row.reserves, row.timeouts, row.releases, row.buries, row.kicks, key, row.keep, permits, maximum, body,
            ) = job
            name = tube.encode()
            row.kind = WHOLE
            row.size = len(body)
            if not 0 < row.id <= ID_MAX or not READY <= row.state <= BURIED or len(body) > KEPT_BODY_MAX:
                raise ValueError("its id, state or body is impossible")
            name_of_key = b"" if key is None else key.encode()
            if not is_name(name) or key is not None and not is_name(name_of_key):
                raise ValueError("its tube or key is impossible")
            name_of_permits = b"" if permits is None else permits.encode()
            if permits is not None and (not is_counter(name_of_permits) or maximum == 0):
                raise ValueError("its permits are impossible")
            if row.created < 0 or row.since < 0 or row.due < 0 or row.ttr == 0:
                raise ValueError("its times are impossible")
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"job {job[0]}: {error}") from None
        row.name_size, row.key_size = <uint8_t>len(name), <uint8_t>len(name_of_key)
        requirement = b"" if permits is None else requirement_bytes(maximum, name_of_permits)
        row.requirement_size = <uint8_t>len(requirement)
        pieces.append((<const uint8_t*>&row)[:sizeof(Row)] + name + name_of_key + requirement + body)
    return b"".join(pieces)
