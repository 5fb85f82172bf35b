# The calls of the lender of permits (contract.Lender), for the gates of the beanstalk protocol.
#
# Floor 2, header only. A call takes some 1 us.

from libc.stdint cimport int64_t, uint32_t

from counterd.protocols.beanstalk._gates cimport Gate, gate_at, gate_free, gate_of, gate_part, permits_name
from counterd.protocols.beanstalk._queues cimport Queues


cdef inline int permit_take(Queues* queues, lender, uint32_t job, int64_t now_ns) except -1:
    """Takes a permit for a job, and returns 1. Returns 0 if no permit is available."""
    cdef uint32_t maximum = queues.gates.claims[job].maximum
    cdef Gate* gate = gate_of(&queues.gates, job)
    if gate.has_permit:
        gate.has_permit = False
        if gate.asked <= maximum:
            return 1
        permit_release(queues, lender, gate, now_ns)
    if gate.place:
        return 0
    return lender.acquire(permits_name(&queues.gates, gate), maximum, now_ns)


cdef inline int permit_release(Queues* queues, lender, Gate* gate, int64_t now_ns) except -1:
    """Gives back a permit of a job of a gate, or of the gate itself."""
    lender.release(permits_name(&queues.gates, gate), now_ns)
    return 0


cdef inline int permit_await(Queues* queues, lender, uint32_t number, int64_t now_ns) except -1:
    """Makes a shut gate wait for a permit for its first job, unless it already waits. Returns 0 if there is no room."""
    cdef Gate* gate = gate_at(&queues.gates, number)
    cdef uint32_t maximum
    if gate.first == 0 or gate.has_permit:
        return 1
    maximum = queues.gates.claims[gate.first].maximum
    if gate.place == 0:
        gate.place = lender.enqueue(permits_name(&queues.gates, gate), maximum, number, now_ns)
    elif gate.asked != maximum:
        lender.amend(gate.place, maximum, now_ns)
    gate.asked = maximum
    return gate.place != 0


cdef inline int claim_end(Queues* queues, lender, uint32_t job, int64_t now_ns) except -1:
    """Ends the claim of a job that has no permit and is not in a queue.

    Also ends the gate if the job was the last job of the gate.
    """
    cdef uint32_t number = queues.gates.claims[job].gate
    cdef Gate* gate = gate_at(&queues.gates, number)
    queues.jobs.records[job].is_gated = False
    if not gate_part(&queues.gates, job):
        return 0
    if gate.place:
        lender.cancel(gate.place, now_ns)
    if gate.has_permit:
        permit_release(queues, lender, gate, now_ns)
    gate_free(&queues.gates, number)
    return 1
