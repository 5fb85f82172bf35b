"""The sentinel protocol's tables for people: the calls in progress, and the flows.

Floor 2 (ARCHITECTURE.md). The tables are walks in slices, see engine/walk.pyx. Times refer to the store's last call.
Ids are texts, because they have 64 bits, and many JSON parsers keep only 53 bits of a number.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.table cimport Record
from counterd.engine.walk cimport BLOCK_WORK, RankedWalk
from counterd.engine.byteorder cimport load_be64
from counterd.protocols.sentinel._rules cimport (
    CONCURRENCY, RULED, Flow, flow_id, resource_bytes, rule_threshold,
)
from counterd.protocols.sentinel._store cimport SentinelStore
from counterd.protocols.sentinel._tokens cimport Token, lease_end

from counterd.settings import integer
from counterd.tables import CONNECTION, Column, Table

cdef double NS_PER_S = 1e9
FLOW_ID_MAX = (1 << 63) - 1

cdef enum:
    BY_COUNT = 1            # the second of the orders of tokens


cdef class TokensWalk(RankedWalk):
    """Lists tokens. The tokens that were held the longest come first, or those with the largest count.

    flow, connection: list only the tokens of one flow, or of one connection; 0 means all.
    """

    cdef int64_t flow

    def __cinit__(self, SentinelStore store not None, *_, int64_t flow=0, **_parameters):
        self.table = &store.tokens.table
        self.flow = flow

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef SentinelStore store = <SentinelStore>self.store
        cdef const Token* token = <const Token*>record
        if self.flow or self.connection:
            self.work -= BLOCK_WORK
            if self.flow and flow_id(&store.rules, token.flow) != self.flow:
                return False
            if self.connection and store.tokens.owners[token.owner].connection != self.connection:
                return False
        rank[0] = token.count if self.sort == BY_COUNT else ~<uint64_t>token.since_ns
        return True

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef SentinelStore store = <SentinelStore>self.store
        cdef const Token* token = <const Token*>record
        cdef int64_t left_ns = lease_end(&store.tokens, token, store.now_ns) - store.now_ns
        return (
            str(<int64_t>load_be64(token.id)), str(flow_id(&store.rules, token.flow)), token.count,
            store.tokens.owners[token.owner].connection, (store.now_ns - token.since_ns) / NS_PER_S,
            left_ns / NS_PER_S, token.kept,
        )


cdef class FlowsWalk(RankedWalk):
    """Lists flows, with the largest by `sort` first."""

    def __cinit__(self, SentinelStore store not None, *_, **_parameters):
        self.table = &store.rules.flows

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef const Flow* flow = <const Flow*>record
        cdef uint64_t[4] figures = [flow.now_calls, flow.passed, flow.blocked, flow.expired]
        rank[0] = figures[self.sort]    # as in TABLES
        return True

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef SentinelStore store = <SentinelStore>self.store
        cdef const Flow* flow = <const Flow*>record
        cdef double threshold = 0
        kind = "no rule"
        if flow.record.flags & RULED:
            kind = "concurrency" if flow.grade == CONCURRENCY else "qps"
            threshold = rule_threshold(&store.rules, flow.threshold, flow.threshold_type, flow.namespace)
        return (
            str(<int64_t>load_be64(flow.id)), resource_bytes(&store.rules, flow), kind, int(min(threshold, 1e18)),
            flow.now_calls, flow.passed, flow.blocked, flow.waiting, flow.expired,
        )


TABLES = (
    Table(
        "tokens",
        "The calls in progress. By default, the longest-running calls come first.",
        (
            Column("token", "text", "the id of the token"),
            Column("flow", "text", "the id of the token's rule"),
            Column("count", "integer", "how much of the threshold the token uses"),
            Column("connection", "connection", "the connection that holds the token"),
            Column("held", "seconds", "how long the token has been held"),
            Column(
                "left",
                "seconds",
                "how long until the lease expires; if negative, the lease is over, and a sweep will free the token",
            ),
            Column("kept", "integer", "how often a client renewed the lease"),
        ),
        ("held", "count"),
        TokensWalk,
        {"flow": integer(1, FLOW_ID_MAX), "connection": CONNECTION},
        has_match=False,
    ),
    Table(
        "flows",
        "The flows. The flows with the largest value of `sort` come first.",
        (
            Column("flow", "text", "the id of the flow's rule"),
            Column("resource", "name", "the resource of the flow's rule"),
            Column(
                "limits", "text", 'concurrency or qps; "no rule" if tokens are still held after their rule was removed'
            ),
            Column(
                "threshold",
                "integer",
                "limit of concurrent calls or of calls a second, for the clients that are connected now",
            ),
            Column("now", "integer", "calls in progress"),
            Column("passed", "integer", "calls that passed since the start"),
            Column("blocked", "integer", "calls that were refused"),
            Column("waiting", "integer", "calls that got a reply to wait"),
            Column("expired", "integer", "calls whose lease expired before they ended"),
        ),
        ("now", "passed", "blocked", "expired"),
        FlowsWalk,
        has_match=False,
    ),
)
