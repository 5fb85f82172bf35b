"""What a load process is to ask: the work of a Plan as numbers, names and bytes. The base of Permits.

A side. All that does not depend on what has been answered, or when.
"""

import os

from cpython.mem cimport PyMem_Free
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.bench._memory cimport Permit, allocate
from counterd.bench._random cimport random_below, zipf_begin, zipf_next
from counterd.bench._words cimport (
    ACQUIRE, BEANSTALK, COUNTER, DATA_AT, DELETE, FLOW, KEEP, MEMCACHED, OPS, REDIS, REDIS_LUA, RELEASE, SENTINEL,
    SMOCKRON, THROTTR, Op, Template, request_write, template_make,
)

from counterd.bench.dialect import NUMBER_SIZES, OPS as DRAWN_NAMES
from counterd.bench.dialects.redis_lua import TOKEN
from counterd.protocols.counter import wire
from counterd.protocols.sentinel.load import FIRST_RATE, FIRST_SEMAPHORE
from counterd.protocols.smockron.load import MOMENT

PROTOCOLS = {
    "counter": COUNTER, "throttr": THROTTR, "redis": REDIS, "memcached": MEMCACHED, "sentinel": SENTINEL,
    "redis-lua": REDIS_LUA, "beanstalk": BEANSTALK, "smockron": SMOCKRON,
}
OP_NAMES = (  # as in Op
    "noop", "get", "acquire", "release", "query", "update", "lower", "insert", "purge", "set", "fetch", "fill", "clear",
    "flow", "param", "keep", "counts", "put", "reserve", "delete", "cycle", "fan", "use", "watch", "ignore",
    "account", "control", "greet", "join", "meet", "listen",
)


cdef class Task:
    """plan: a Plan; index: which of its processes this is."""

    def __cinit__(self, plan, board, int index, *_):
        self.dialect.protocol = PROTOCOLS[plan.protocol]
        self.dialect.width = NUMBER_SIZES[plan.number_type]
        self.dialect.value_size = plan.buffer_size
        self.index = index
        self.random = (plan.seed * 1000003 + index) & 0xffffffffffffffff
        self.set_names(plan, index)
        self.set_work(plan)
        self.set_templates(plan, index)

    def __dealloc__(self):
        cdef int i
        for i in range(OPS):
            PyMem_Free(self.templates[i].data)
        PyMem_Free(self.marker_acquire.data)
        PyMem_Free(self.marker_get.data)

    cdef int set_names(self, plan, int index) except -1:
        self.names = plan.names
        self.stride = plan.processes
        self.sequence = self.fresh = index
        self.token = int.from_bytes(os.urandom(4), "big") << 32
        self.fill_next = index if plan.prefill and plan.dialect.fill else self.names
        self.fills_buffers = plan.fetches() and ("get" in plan.work.weights or "set" in plan.work.weights)
        self.fills_numbers = not plan.work.weights.keys() <= {"set", "get"} or not self.fills_buffers
        self.keys = {"uniform": UNIFORM, "zipf": ZIPF, "seq": SEQUENCE}[plan.keys.kind]
        if self.keys == ZIPF:
            zipf_begin(&self.zipf, plan.keys.exponent, self.names)
        self.name_size = plan.name_size
        return 0

    cdef int set_work(self, plan) except -1:
        cdef uint32_t sum = 0
        cdef int i, op
        weights = plan.work.weights
        tokens = self.dialect.protocol == SENTINEL or self.dialect.protocol == REDIS_LUA
        self.pairs, self.in_turn = not weights and not tokens, not weights and tokens
        self.names_tokens = self.dialect.protocol == REDIS_LUA
        for i in range(DRAWN):
            sum += weights.get(DRAWN_NAMES[i], 0)
            name = DRAWN_NAMES[i]
            op = OP_NAMES.index("fetch" if name == "get" and plan.fetches() else name)
            self.ops[i] = <Op>op
            self.weights[i] = sum
        self.holds = plan.hold is not None
        if self.holds:
            self.hold_ns = plan.hold.mean * 1e9
            self.hold_is_random = plan.hold.kind == "exp"
        # Whose permits they are matters to what releases them, and to what a dying connection gives back.
        uses = "release" in weights or "keep" in weights or plan.verify
        self.track_held = self.in_turn or "acquire" in weights and uses
        self.track_inserted = "purge" in weights
        self.resources = plan.resources
        self.maximum = plan.maximum
        self.depth = plan.depth
        self.keep_alive = plan.keep_alive
        return 0

    cdef int set_templates(self, plan, int index) except -1:
        cdef int digits = min(plan.name_size, 8)
        cdef int number
        requests_of, heads = plan.dialect.requests, plan.dialect.names(plan, os.getpid())
        for op in requests_of(plan, b"x"):
            # Printable and without a space once the digits are written: before, they are like nothing else there.
            name = heads.get(op, heads[""]) + b"\xff" * digits
            number = OP_NAMES.index(op)
            template_make(&self.templates[number], requests_of(plan, name)[op], name, digits)
            self.set_numbers(number)
        marker = b"k%07x" % (os.getpid() * 1000 + index & 0xfffffff) + b"0" * 8
        template_make(&self.marker_acquire, wire.acquire(0, marker, 1, 1), marker, 8)
        template_make(&self.marker_get, wire.get(0, marker), marker, 8)
        return 0

    cdef int set_numbers(self, int number) except -1:
        """Where a flow or a token stands, in requests that have no name."""
        cdef Template* template = self.templates + number
        template.is_open = number == <int>DELETE
        if self.dialect.protocol == REDIS_LUA or self.dialect.protocol == BEANSTALK:
            template.token_at = max(0, template.data[: template.size].rfind(TOKEN))
        elif self.dialect.protocol == SMOCKRON:
            template.moment_at = max(0, template.data[: template.size].rfind(MOMENT))
        elif self.dialect.protocol == SENTINEL:
            if number == <int>ACQUIRE or number == <int>FLOW:
                template.flow_at = DATA_AT
                template.first_flow = FIRST_SEMAPHORE if number == <int>ACQUIRE else FIRST_RATE
            elif number == <int>RELEASE or number == <int>KEEP:
                template.token_at = DATA_AT
        return 0

    cdef Op next_op(self) noexcept:
        cdef uint32_t draw = random_below(&self.random, self.weights[DRAWN - 1])
        cdef int i = 0
        while draw >= self.weights[i]:
            i += 1
        return self.ops[i]

    cdef uint32_t next_name(self) noexcept:
        cdef uint64_t name
        if self.keys == UNIFORM:
            return random_below(&self.random, self.names)
        if self.keys == ZIPF:
            return zipf_next(&self.zipf, &self.random)
        name = self.sequence % self.names
        self.sequence += self.stride
        return <uint32_t>name

    cdef uint32_t next_fresh(self) noexcept:
        cdef uint32_t name = self.fresh
        self.fresh += <uint32_t>self.stride
        return name

    cdef uint64_t next_token(self) noexcept:
        return self.token | self.next_fresh()

    cdef str name_of(self, uint32_t name):
        """Of an acquire, for people."""
        cdef Template* template = self.templates + <int>ACQUIRE
        cdef size_t end = template.name_at + template.digits
        cdef uint8_t* request
        cdef Permit permit = Permit(0, name)
        if template.flow_at:
            return f"flow {template.first_flow + name}"
        request = <uint8_t*>allocate(template.size, 1)
        try:
            request_write(template, request, self.dialect.protocol, &permit, 0)
            return (<char*>request)[end - self.name_size : end].decode()
        finally:
            PyMem_Free(request)
