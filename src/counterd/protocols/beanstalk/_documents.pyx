"""The replies to stats, stats-job, stats-tube and inspect-tube, in YAML.

Floor 2 (ARCHITECTURE.md). The replies are made within a call of the store.
"""

from libc.stdint cimport int64_t, uint32_t

from counterd.engine.table cimport Record, name_bytes
from counterd.protocols.beanstalk._groups cimport group_of, permits_name
from counterd.protocols.beanstalk._jobs cimport BLOCKED, BURIED, DELAYED, READY, RESERVED, Job, job_at, job_id
from counterd.protocols.beanstalk._keys cimport key_at
from counterd.protocols.beanstalk._queues cimport SECOND_NS, job_is_blocked
from counterd.protocols.beanstalk._store cimport BeanstalkState, BeanstalkStore
from counterd.protocols.beanstalk._tubes cimport Tube, tube_at, tubes_count
from counterd.protocols.beanstalk._wire cimport COMMAND_WORDS, COMMANDS
from counterd.protocols.beanstalk._workers cimport WorkersState

# The release of beanstalkd whose commands the protocol has. Clients compare it with those in which commands were new.
BEANSTALKD_VERSION = b"1.13"

STATE_NAMES = ("", "ready", "reserved", "delayed", "buried")  # by JobState


cdef bytes job_document(BeanstalkStore store, uint32_t number):
    """Returns the YAML of section "stats-job". Returns None if number is 0."""
    cdef const Job* job
    cdef int64_t left_ns = 0
    if number == 0:
        return None
    job = job_at(&store.queues.jobs, number)
    if job.state == RESERVED or job.state == DELAYED:
        left_ns = <int64_t>job.node.key - store.now_ns
    told = {
        "id": job_id(job),
        "tube": name_bytes(&store.queues.tubes.table, &tube_at(&store.queues.tubes, job.tube).record),
        "state": STATE_NAMES[job.state],
        "pri": job.priority,
        "age": (store.now_ns - job.created_ns) // SECOND_NS,
        "delay": job.delay,
        "ttr": job.ttr,
        "time-left": max(left_ns, 0) // SECOND_NS,
        "file": 0,
        "reserves": job.reserves,
        "timeouts": job.timeouts,
        "releases": job.releases,
        "buries": job.buries,
        "kicks": job.kicks,
    }
    if job.key:
        told["key"] = name_bytes(&store.queues.keys.table, &key_at(&store.queues.keys, job.key).record)
    if job.is_limited:
        told["counter"] = permits_name(&store.queues.groups, group_of(&store.queues.groups, number))
        told["maximum"] = store.queues.groups.requirements[number].maximum
        told["blocked"] = "true" if job_is_blocked(&store.queues, number) else "false"
    return document(told)


cdef bytes tube_document(BeanstalkStore store, uint32_t number, bint whole):
    """Returns the YAML of section "stats-tube" or, if whole is true, "inspect-tube". Returns None if number is 0."""
    cdef const Tube* tube
    cdef Tube* retire_to = NULL
    cdef int64_t left_ns
    if number == 0:
        return None
    tube = tube_at(&store.queues.tubes, number)
    if tube.retire_to:
        retire_to = tube_at(&store.queues.tubes, tube.retire_to)
    left_ns = tube.paused_until_ns - store.now_ns if tube.pause else 0
    told = {
        "name": name_bytes(&store.queues.tubes.table, <Record*>&tube.record),
        "current-jobs-urgent": tube.urgent,
        "current-jobs-ready": tube.jobs[<int>READY],
        "current-jobs-reserved": tube.jobs[<int>RESERVED],
        "current-jobs-delayed": tube.jobs[<int>DELAYED],
        "current-jobs-buried": tube.jobs[<int>BURIED],
        "total-jobs": tube.total,
        "current-using": tube.using,
        "current-watching": tube.watching,
        "current-waiting": tube.waiting,
        "cmd-delete": tube.deletes,
        "cmd-pause-tube": tube.pauses,
        "pause": tube.pause,
        "pause-time-left": max(left_ns, 0) // SECOND_NS,
    }
    if whole:
        told["age-of-oldest-ready"] = store.oldest_ready_ns(tube) // SECOND_NS
        told["time-in-queue"] = f"{tube.queued_ns / max(tube.reserves, 1) / 1e9:.6f}"
        told["max-reserves"] = tube.reserves_max
        told["retire-to"] = name_bytes(&store.queues.tubes.table, &retire_to.record) if retire_to != NULL else b""
        told["current-jobs-blocked"] = tube.jobs[<int>BLOCKED]
    return document(told)


cdef bytes stats_document(BeanstalkStore store):
    """Returns the YAML of section "stats"."""
    cdef BeanstalkState* state = store.state
    cdef const WorkersState* workers = store.queues.workers.state
    cdef dict others = store.others()  # must not call the store, because a call is under way
    cdef int command
    figures = {
        "current-jobs-urgent": state.urgent,
        "current-jobs-ready": state.counts[<int>READY],
        "current-jobs-reserved": state.counts[<int>RESERVED],
        "current-jobs-delayed": state.counts[<int>DELAYED],
        "current-jobs-buried": state.counts[<int>BURIED],
    }
    for command in range(COMMANDS):
        figures[f"cmd-{COMMAND_WORDS[command].text.decode()}"] = state.requests[command]
    figures.update({
        "job-timeouts": state.timeouts,
        "total-jobs": store.queues.jobs.state.total,
        "max-job-size": store.job_size_max,
        "current-tubes": tubes_count(&store.queues.tubes),
        "current-connections": store.sessions_open,
        "current-producers": workers.producers,
        "current-workers": workers.workers,
        "current-waiting": workers.waiting,
        "total-connections": store.sessions_total,
        "pid": others["pid"],
        "version": BEANSTALKD_VERSION,
        "rusage-utime": others["rusage_utime"],
        "rusage-stime": others["rusage_stime"],
        "uptime": others["uptime"],
        "binlog-oldest-index": 0,
        "binlog-current-index": 0,
        "binlog-records-migrated": 0,
        "binlog-records-written": state.records_written,
        "binlog-max-size": 0,
        "counterd-version": others["version"].encode(),
        "draining": "true" if state.refuses_puts or state.draining else "false",
    })
    return document({**figures, **store.host})


cdef bytes document(dict values):
    """Formats a dictionary as YAML. Numbers and strings are written unchanged, and bytes in quotes."""
    lines = ["---"]
    for name, value in values.items():
        lines.append(f'{name}: "{value.decode()}"' if isinstance(value, bytes) else f"{name}: {value}")
    return ("\n".join(lines) + "\n").encode()
