"""The sentinel protocol's store: its parts, their ticks, and the decisions that extensions make.

Floor 2 (ARCHITECTURE.md). Each part has its own file: permits (namespaces with connections), rules, the rates that the
rules allow, tokens, the sweep that ends leases, and later answers. All parts except the later answers are in the
region.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport SLICE_STEPS, Session, Store
from counterd.engine.audit cimport audit_chains, audit_permits
from counterd.engine.byteorder cimport load_be64, load_le64, store_be64
from counterd.engine.chains cimport BLOCK_SIZE, chains_begin, chains_reserve
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.later cimport Later
from counterd.engine.permits cimport permits_begin, permits_give_back, permits_leave, permits_reserve
from counterd.engine.table cimport RECORD_USED, name_tag
from counterd.engine.wheel cimport timers_next_ns
from counterd.protocols.sentinel._audits cimport audit_rules, audit_tokens, audit_values
from counterd.protocols.sentinel._loading cimport rules_load
from counterd.protocols.sentinel._messages cimport (
    ACQUIRE, BAD_REQUEST, FAIL, FLOW, ID_SIZE, KEEP, NAMESPACE_MAX, NO_RULE, NOT_AVAILABLE, OK, PARAM, PING, RELEASE,
    REPLY_SIZE, STATUS_MIN, STATUSES, TYPES, Answer, Request, answer_of, reply_encode,
)
from counterd.protocols.sentinel._rates cimport ITEMS_MAX, rates_begin, rates_reserve, values_expire
from counterd.protocols.sentinel._rules cimport (
    NAMESPACES_MAX, RULED, RULES_MAX, Flow, after, flow_at, flow_id, flow_is_for_calls, id_find, rules_begin,
    rules_reserve,
)
from counterd.protocols.sentinel._sweep cimport (
    sweep_begin, sweep_due_ns, sweep_end, sweep_pause, sweep_reserve, sweep_take,
)
from counterd.protocols.sentinel._tokens cimport (
    JUDGED, Token, TokensState, client_find, client_handle, client_leave, lease_end, leavers_arm, token_acquire,
    token_arm, token_at, token_expire, token_is_online, token_keep, token_release, tokens_begin, tokens_reserve,
)
from counterd.protocols.sentinel._window cimport SAMPLES_MAX

from counterd.protocols.sentinel._calls import Call, Lease

cdef enum:
    CALLS_MAX = 1024        # unanswered calls to a token service; more are answered 5 at once
    BATCHES_MAX = 16        # batches that an expire strategy has not judged; then the sweep waits
    BATCH_MAX = 256         # tokens in a batch

# The limits of memory in C. Other modules have the same constants: a test compares them.
LIMITS = {
    "namespace": NAMESPACE_MAX,
    "namespaces": NAMESPACES_MAX,
    "rules": RULES_MAX,
    "samples": SAMPLES_MAX,
    "items": ITEMS_MAX,
}
TYPE_NAMES = {PING: "ping", FLOW: "flow", PARAM: "param", ACQUIRE: "acquire", RELEASE: "release", KEEP: "keep"}
STATUS_NAMES = (
    "bad_request", "", "too_many_requests", "fail", "ok", "blocked", "should_wait", "no_rule", "no_ref_rule",
    "not_available", "release_ok", "already_released",
)
NS_PER_TENTH = 100000000
KINDS = {ACQUIRE: "request", RELEASE: "release", KEEP: "keep"}


cdef inline int64_t earlier(int64_t one, int64_t other) noexcept:
    """Returns the earlier of two times, where -1 means never."""
    return one if other < 0 or 0 <= one < other else other


cdef class SentinelStore(Store):
    """The store of the protocol. open_store() in _session.pyx makes it and sets the sizes of its parts.

    namespaces: the most namespaces with connections. holdings: the most holdings of all connections;
    holdings_per_connection: of each connection.
    name_memory: bytes of blocks. tokens: the most tokens. param_values: the most values, without hot items. rules: the
    most rules of each kind. items: the most hot items. token_key: 16 random bytes from which the ids of tokens are
    made.
    """

    def __cinit__(
        self, *, bytes hash_key, bytes token_key not None, uint32_t namespaces, uint32_t holdings,
        uint32_t holdings_per_connection, uint64_t name_memory, uint32_t tokens, uint32_t param_values,
        uint32_t rules=RULES_MAX, uint32_t items=ITEMS_MAX, **_,
    ):
        cdef uint64_t[2] id_key
        if len(token_key) != 16:
            raise ValueError(f"token_key must have 16 bytes, not {len(token_key)}")
        id_key[0] = load_le64(<const uint8_t*>PyBytes_AS_STRING(token_key))
        id_key[1] = load_le64(<const uint8_t*>PyBytes_AS_STRING(token_key) + 8)
        self.calls = Later(CALLS_MAX, settle=settle_call, give_up=give_up_call, recall=recall_call)
        self.batches = Later(BATCHES_MAX, settle=settle_batch, give_up=give_up_batch)
        self.noted_calls = []
        self.noted_leases = []
        chains_reserve(&self.chains, &self.region, name_memory // BLOCK_SIZE)
        permits_reserve(&self.permits, &self.region, &self.connections, namespaces, holdings)
        rules_reserve(&self.rules, &self.region, &self.permits, rules)
        rates_reserve(&self.rates, &self.region, &self.rules, param_values, items)
        tokens_reserve(&self.tokens, &self.region, &self.rules, tokens)
        sweep_reserve(&self.sweep, &self.region)
        self.map_region(hash_key)
        chains_begin(&self.chains)
        permits_begin(&self.permits, self.header.key, &self.chains)
        self.permits.state.holdings_per_connection = holdings_per_connection
        rules_begin(&self.rules, self.header.key, &self.chains)
        rates_begin(&self.rates, self.header.key, &self.chains, self.now_ns)
        tokens_begin(&self.tokens, self.header.key, id_key, &self.chains, self.now_ns)

    def set_limits(self, *, double max_allowed_qps, int64_t sweep_interval_ns, uint32_t sweep_max_tokens,
                   int64_t sweep_max_duration_ns):
        """Sets the limits that can change while the store runs. sweep_max_tokens: 0 means no limit."""
        self.rates.qps_max = max_allowed_qps
        self.sweep.interval_ns = sweep_interval_ns
        self.sweep.tokens_max = sweep_max_tokens
        self.sweep.duration_ns = sweep_max_duration_ns

    def load_rules(self, rules):
        """Replaces all rules. rules: a protocols.sentinel.rules.Rules. If it raises ValueError, nothing has changed.

        A flow keeps its tokens. Flows and values keep their windows if the length and the number of samples stay the
        same.
        """
        with self:
            if rules_load(&self.rates, rules):
                self.has_work = True

    cdef void forget(self, uint32_t connection) noexcept:
        client_leave(&self.tokens, connection, self.now_ns)
        permits_leave(&self.permits, connection)
        self.has_work = True

    # ---- time ----

    cdef int64_t due_ns(self) except? -2:
        cdef int64_t due_ns
        if self.permits.state.leaving_first or self.tokens.state.leaving_first:
            return 0
        if self.noted_calls or self.noted_leases:
            return 0
        due_ns = earlier(sweep_due_ns(&self.sweep, &self.tokens), timers_next_ns(&self.rates.timers))
        return earlier(due_ns, earlier(self.calls.next_deadline(), self.batches.next_deadline()))

    cpdef tick(self, int64_t now_ns):
        """Does a slice of the work that is due.

        After the call has ended, passes the noted calls and leases to extensions.
        """
        Store.tick(self, now_ns)
        self.submit()

    cdef int run_due(self) except -1:
        """Handles ended connections, leases that are over, values that have expired, and overdue answers."""
        cdef int steps = permits_give_back(&self.permits, SLICE_STEPS)
        steps = leavers_arm(&self.tokens, steps)
        steps = self.sweep_leases(steps)
        values_expire(&self.rates, self.now_ns, steps)
        self.calls.expire(self.now_ns)
        self.batches.expire(self.now_ns)
        return 0

    cdef int sweep_leases(self, int steps) except? -1:
        """Continues a sweep, or begins a sweep if it is due. Returns how many of the steps remain."""
        cdef uint32_t number
        if steps == 0 or not sweep_begin(&self.sweep, &self.tokens, self.now_ns):
            return steps
        if self.submit_leases is not None:
            steps = min(steps, <int>BATCH_MAX)
            if self.batches.is_full():
                sweep_end(&self.sweep)
                return steps
        number = sweep_take(&self.sweep, &self.tokens, self.now_ns, &steps)
        while number:
            self.end_lease(number)
            number = sweep_take(&self.sweep, &self.tokens, self.now_ns, &steps)
        sweep_pause(&self.sweep, self.now_ns, steps)
        return steps

    cdef int end_lease(self, uint32_t number) except -1:
        """Ends the lease of a token that was taken from the wheel, or arms the token's timer again."""
        cdef Token* token = token_at(&self.tokens, number)
        cdef int64_t end_ns = lease_end(&self.tokens, token, self.now_ns)
        if end_ns > self.now_ns:  # the server renews the lease, or its rule has changed
            token_arm(&self.tokens, number, end_ns)
        elif self.submit_leases is None or token.record.flags & JUDGED:
            token_expire(&self.tokens, number)
        else:
            self.noted_leases.append(Lease(
                <int64_t>load_be64(token.id), flow_id(&self.rules, token.flow), token.count,
                (self.now_ns - token.since_ns) // 1000000, token_is_online(&self.tokens, token),
            ))
            token_arm(&self.tokens, number, self.now_ns + self.leases_timeout_ns)
            token.record.flags |= JUDGED
        return 0

    # ---- decisions of extensions ----

    def delegate(self, submit, int64_t timeout_ns=0):
        """Lets a token service answer ACQUIRE, RELEASE and KEEP. tick() calls submit() with lists of Calls.

        Each Call has to be answered by answer(). After timeout_ns the store replies with the status 5. None means that
        the store decides itself.
        """
        self.submit_calls = submit
        self.calls_timeout_ns = timeout_ns

    def delegate_expiry(self, submit, int64_t timeout_ns=0):
        """Lets an expire strategy decide about tokens whose lease is over. tick() calls submit() with a ticket and
        Leases.

        Each batch has to be answered by expire(). After timeout_ns all its tokens end. None means that tokens end
        immediately.
        """
        self.submit_leases = submit
        self.leases_timeout_ns = timeout_ns
        self.tokens.are_judged = submit is not None

    cdef bint decide_later(self, Session session, const Request* request) except -1:
        """Notes a request for the token service.

        Returns False if there are too many such requests, or if the daemon drains.
        """
        cdef Asked asked = Asked()
        cdef int64_t id = <int64_t>load_be64(request.id)
        cdef bint is_request = request.kind == ACQUIRE
        if self.calls.is_full() or is_request and self.tokens.draining:
            return False
        address = session.owner.origin() if session.owner is not None else ""
        asked.store = self
        asked.session = session
        asked.xid = request.xid
        asked.type = request.kind
        ticket = self.calls.ask(asked, self.now_ns + self.calls_timeout_ns)
        session.awaited += 1
        self.noted_calls.append(Call(
            ticket, KINDS[asked.type], id if is_request else 0, request.count if is_request else 0,
            is_request and request.prioritized != 0, 0 if is_request else id,
            client_handle(&self.tokens, session.connection), address,
        ))
        self.has_work = True
        return True

    cdef int note_release(self, int64_t token_id) except -1:
        """Makes the token service release a token that it has granted to a client that no longer waits."""
        cdef Asked asked = Asked()
        asked.store = self
        asked.type = RELEASE
        ticket = self.calls.ask(asked, self.now_ns + self.calls_timeout_ns, True)
        if ticket:
            self.noted_calls.append(Call(ticket, KINDS[asked.type], 0, 0, False, token_id, 0, ""))
            self.has_work = True
        return 0

    cdef int reply_later(self, Session session, uint32_t xid, int type, int status, int64_t value) except -1:
        """Posts the reply to a request that was decided later."""
        cdef uint8_t[REPLY_SIZE] data
        cdef Answer answer = answer_of(status)
        cdef uint32_t size
        answer.value = value
        size = reply_encode(data, xid, <uint8_t>type, &answer)
        session.awaited -= 1
        self.answers[type][status - STATUS_MIN] += 1
        session.post(PyBytes_FromStringAndSize(<const char*>data, size))
        return 0

    def answer(self, uint64_t ticket, int status, int64_t value, int64_t now_ns):
        """Applies a token service's answer to a Call. value: the id of a token, or the milliseconds of its lease.

        If the client no longer waits for a granted token, the service is asked to release it. An unknown status becomes
        -1.
        """
        if not STATUS_MIN <= status < STATUS_MIN + STATUSES:
            status = FAIL
        with self.at(now_ns):
            self.calls.answer(ticket, (status, value if status == OK else 0))

    def expire(self, uint64_t ticket, token_ids, int64_t now_ns):
        """Applies an expire strategy's answer to a batch: the tokens in token_ids end, the other tokens get another
        lease."""
        going = set(token_ids)
        with self.at(now_ns):
            self.batches.answer(ticket, going)
            self.has_work = True

    cdef int end_batch(self, list token_ids, int64_t deadline_ns, set going) except -1:
        cdef uint32_t number
        cdef Token* token
        for token_id in token_ids:
            number = id_find(&self.tokens.table, token_id)
            if number == 0:
                continue  # the token was released meanwhile
            token = token_at(&self.tokens, number)
            if not token.record.flags & JUDGED or token.timer.due_ns != deadline_ns:
                continue  # the token was kept meanwhile, and may be in a later batch
            if token_id in going:
                token_expire(&self.tokens, number)
            else:
                token_arm(
                    &self.tokens, number, after(self.now_ns, 2 * flow_at(&self.rules, token.flow).resource_ns)
                )
        return 0

    cdef int submit(self) except -1:
        """Passes the noted calls and leases to extensions, which may answer immediately."""
        cdef Batch batch
        cdef int64_t now_ns = self.now_ns
        cdef list calls = self.noted_calls, leases = self.noted_leases
        if calls:
            self.noted_calls = []
            if self.submit_calls is not None:
                self.submit_calls(calls)
        if leases:
            self.noted_leases = []
            if self.submit_leases is not None:
                batch = Batch()
                batch.store = self
                batch.deadline_ns = now_ns + self.leases_timeout_ns
                batch.token_ids = [lease.token_id for lease in leases]
                self.submit_leases(self.batches.ask(batch, batch.deadline_ns), leases)
        return 0

    # ---- requests as Python methods, for extensions and tests ----

    def request_token(self, int64_t flow, int64_t count, bint _prioritized, uint64_t client, int64_t now_ns):
        """Executes an ACQUIRE.

        client: as in a Call; 0 means no client, so the tokens end only with their lease. Returns (status, token id).
        """
        cdef uint32_t number, connection
        cdef Answer answer
        if flow <= 0 or not 0 < count <= INT32_MAX:
            return BAD_REQUEST, 0
        with self.at(now_ns):
            number = id_find(&self.rules.flows, flow)
            if number == 0 or not flow_is_for_calls(flow_at(&self.rules, number)):
                return NO_RULE, 0
            connection = client_find(&self.tokens, client)
            if client and not connection:
                return NOT_AVAILABLE, 0
            answer = answer_of(OK)
            token_acquire(&self.tokens, number, <uint32_t>count, connection, now_ns, &answer)
            self.expect(answer.due_ns)
            return answer.status, answer.value

    def release_token(self, int64_t token_id, int64_t now_ns):
        """Executes a RELEASE. Returns a status."""
        cdef uint8_t[ID_SIZE] id
        store_be64(id, <uint64_t>token_id)
        with self.at(now_ns):
            return token_release(&self.tokens, id, name_tag(&self.tokens.table, id, ID_SIZE), now_ns)

    def keep_token(self, int64_t token_id, uint64_t client, int64_t now_ns):
        """Executes a KEEP. client: as in request_token(). Returns (status, remaining milliseconds)."""
        cdef uint8_t[ID_SIZE] id
        cdef uint32_t connection
        cdef Answer answer
        store_be64(id, <uint64_t>token_id)
        with self.at(now_ns):
            connection = client_find(&self.tokens, client)
            if client and not connection:
                return NOT_AVAILABLE, 0
            answer = answer_of(OK)
            token_keep(&self.tokens, id, name_tag(&self.tokens.table, id, ID_SIZE), connection, now_ns, &answer)
            self.expect(answer.due_ns)
            return answer.status, answer.value

    # ---- figures ----

    def flow(self, int64_t id):
        """Returns the figures of a flow by name. Returns None if the flow has neither a rule nor tokens."""
        cdef uint32_t number
        cdef Flow* flow
        with self:
            number = id_find(&self.rules.flows, id)
            if number == 0:
                return None
            flow = flow_at(&self.rules, number)
            return {
                "ruled": flow.record.flags & RULED != 0,
                "grade": flow.grade,
                "now_calls": flow.now_calls,
                "tokens": flow.tokens,
                "passed": flow.passed,
                "blocked": flow.blocked,
                "waiting": flow.waiting,
                "expired": flow.expired,
            }

    cdef dict figures(self):
        cdef TokensState* state = self.tokens.state
        cdef dict figures = Store.figures(self)
        cdef uint32_t number, flows = 0
        for number in range(1, self.rules.flows.pool.fresh + 1):
            flows += flow_at(&self.rules, number).record.flags & RULED
        figures.update({
            "rules_flow": flows,
            "rules_param": self.rules.params.pool.used,
            "namespaces": self.permits.table.pool.used,
            "holdings": self.permits.state.holdings.used,
            "holdings_leaving": self.permits.state.leaving_holdings,
            "tokens": self.tokens.table.pool.used,
            "tokens_max": self.tokens.table.pool.capacity,
            "granted": state.granted,
            "released": state.released,
            "kept": state.kept,
            "late": state.late,
            "expired_offline": state.expired_offline,
            "expired_lease": state.expired_lease,
            "param_values": self.rates.values.pool.used - self.rates.state.hot,
            "param_values_max": self.rates.values_max,
            "hot_items": self.rates.state.hot,
            "calls_pending": len(self.calls),
            "calls_overdue": self.calls.overdue + self.batches.overdue,
        })
        return figures

    def outcomes(self):
        """Implements Store.outcomes, for each type and status."""
        cdef int type, status
        names = [*TYPE_NAMES.values(), "unknown"]
        return [
            (names[type], STATUS_NAMES[status], self.answers[type][status])
            for type in range(TYPES + 1) for status in range(STATUSES) if self.answers[type][status]
        ]

    def begin_drain(self):
        self.tokens.draining = True

    def held(self):
        """Implements Store.held: tokens."""
        with self:
            return self.tokens.table.pool.used

    def holdings_of(self, uint32_t connection):
        """Implements Store.holdings_of: tokens that a connection owns."""
        if connection > CONNECTIONS_MAX:
            return 0
        with self:
            return self.tokens.owners[self.tokens.clients[connection].owner].tokens

    def leases(self, size_t limit):
        """Implements Store.leases: the first `limit` tokens. The names are those of the tokens' flows."""
        cdef uint32_t number
        cdef Token* token
        cdef list found = []
        with self:
            for number in range(1, self.tokens.table.pool.fresh + 1):
                token = token_at(&self.tokens, number)
                if <size_t>len(found) >= limit:
                    break
                if token.record.flags & RECORD_USED:
                    name = b"flow %d" % flow_id(&self.rules, token.flow)
                    connection = self.tokens.owners[token.owner].connection
                    found.append((connection, name, token.count, token.since_ns // NS_PER_TENTH))
        return found

    cdef int audit_parts(self) except -1:
        """Implements Store.audit_parts: checks namespaces and their connections, rules, values, tokens and owners."""
        cdef uint64_t blocks = <uint64_t>audit_permits(&self.permits) + audit_rules(&self.rules)
        blocks += <uint64_t>audit_values(&self.rates) + audit_tokens(&self.tokens)
        audit_chains(&self.chains, <uint32_t>blocks)
        return 0


# ---- later answers -------------------------------------------------------------------------------------------------

cdef class Asked:
    """A request that a token service has to answer, and the session that waits for the answer."""


cdef class Batch:
    """Leases about which an expire strategy has to decide."""


def settle_call(Asked asked, tuple outcome):
    """Called when a token service answered in time. outcome: (status, value)."""
    cdef int status = outcome[0]
    if asked.session is not None and not asked.session.closing:
        asked.store.reply_later(asked.session, asked.xid, asked.type, status, outcome[1])
    elif asked.type == ACQUIRE and status == OK:
        asked.store.note_release(outcome[1])


def give_up_call(Asked asked):
    """Called when a token service did not answer in time. A token that the service grants later has to be released."""
    cdef Session session = asked.session
    asked.session = None
    if session is not None:
        asked.store.reply_later(session, asked.xid, asked.type, NOT_AVAILABLE, 0)
    return asked.type == ACQUIRE


def recall_call(Asked asked, tuple outcome):
    """Called when a token service answered late. Releases the token if the service granted one."""
    if outcome[0] == OK:
        asked.store.note_release(outcome[1])


def settle_batch(Batch batch, set going):
    """Called when an expire strategy answered in time."""
    batch.store.end_batch(batch.token_ids, batch.deadline_ns, going)


def give_up_batch(Batch batch):
    """Called when an expire strategy did not answer in time.

    The tokens' timers end the tokens; a late answer is ignored.
    """
    return False
