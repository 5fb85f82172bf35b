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

from counterd.listing import CONNECTION, ROWS, ROWS_MAX, Column, Table, read_parameters
from counterd.settings import choice, integer

cdef double NS_PER_S = 1e9
FLOW_ID_MAX = (1 << 63) - 1
TOKEN_SORTS = ("held", "count")
FLOW_SORTS = ("now", "passed", "blocked", "expired")

cdef enum Order:
    HELD
    COUNT
    NOW
    PASSED
    BLOCKED
    EXPIRED

cdef dict ORDERS = {
    "held": HELD, "count": COUNT, "now": NOW, "passed": PASSED, "blocked": BLOCKED, "expired": EXPIRED,
}


cdef class TokensWalk(RankedWalk):
    """Lists tokens. The tokens that were held the longest come first, or those with the largest count.

    flow, connection: list only the tokens of one flow, or of one connection, by its number; 0 means all.
    """

    cdef Order order
    cdef int64_t flow
    cdef uint32_t connection

    def __cinit__(self, SentinelStore store not None, bytes _match, uint32_t limit, str sort, int64_t flow,
                  uint32_t connection=0):
        self.table = &store.tokens.table
        self.order = <Order><int>ORDERS[sort]
        self.flow = flow
        self.connection = connection

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef SentinelStore store = <SentinelStore>self.store
        cdef const Token* token = <const Token*>record
        if self.flow or self.connection:
            self.work -= BLOCK_WORK
            if self.flow and flow_id(&store.rules, token.flow) != self.flow:
                return False
            if self.connection and store.tokens.owners[token.owner].connection != self.connection:
                return False
        rank[0] = token.count if self.order == COUNT else ~<uint64_t>token.since_ns
        return True

    cdef tuple row(self, bytes name, const Record* record):
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

    cdef Order order

    def __cinit__(self, SentinelStore store not None, bytes _match, uint32_t limit, str sort):
        self.table = &store.rules.flows
        self.order = <Order><int>ORDERS[sort]

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef const Flow* flow = <const Flow*>record
        if self.order == NOW:
            rank[0] = flow.now_calls
        elif self.order == PASSED:
            rank[0] = flow.passed
        elif self.order == BLOCKED:
            rank[0] = flow.blocked
        else:
            rank[0] = flow.expired
        return True

    cdef tuple row(self, bytes name, const Record* record):
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


def open_tokens(SentinelStore store, parameters):
    """Begins a walk through the tokens."""
    readers = {
        "flow": integer(1, FLOW_ID_MAX),
        "connection": CONNECTION,
        "sort": choice(*TOKEN_SORTS),
        "limit": integer(1, ROWS_MAX),
    }
    values = read_parameters(parameters, readers, {"flow": 0, "connection": 0, "sort": TOKEN_SORTS[0], "limit": ROWS})
    return TokensWalk(store, b"", values["limit"], values["sort"], values["flow"], values["connection"])


def open_flows(SentinelStore store, parameters):
    """Begins a walk through the flows."""
    readers = {"sort": choice(*FLOW_SORTS), "limit": integer(1, ROWS_MAX)}
    values = read_parameters(parameters, readers, {"sort": FLOW_SORTS[0], "limit": ROWS})
    return FlowsWalk(store, b"", values["limit"], values["sort"])


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
        TOKEN_SORTS,
        open_tokens,
        ("flow", "connection"),
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
        FLOW_SORTS,
        open_flows,
    ),
)
