/*
 * Acquire, release, close and reclaim of the counter protocol's engine (src/counterd/_core.pxd, _core.pyx), for spin.
 *
 * The daemon is one thread, so each call into the engine is one indivisible step (d_step); what interleaves are these
 * calls, the clients, and the messages between them. Each connection number has a client at one end and the server's
 * socket at the other. What is modelled and what is not: README.md; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: DOUBLE_GIVE_BACK, RECLAIM_HELD, WRAP, PUSH_TWICE, OVERRUN,
 * FREE_EARLY, SWEEP_FIRST. With UNFENCED one fails that counterd does not make.
 */

#ifndef CONNECTIONS
#define CONNECTIONS 3   /* numbers, of those that leave too */
#endif
#ifndef NAMES
#define NAMES 2
#endif
#ifndef RECORDS
#define RECORDS 1
#endif
#ifndef HOLDINGS
#define HOLDINGS 2      /* of the ledger */
#endif
#ifndef LIMIT
#define LIMIT 2         /* the maximum of each acquire */
#endif
#ifndef RESOURCES
#define RESOURCES LIMIT /* of a request, at most */
#endif
#define RECLAIM_STEPS 1
#define SLICE_STEPS 1

/* What a connection is. OPEN: at both ends. ENDED: the client has gone, and the server has not seen it. LEAVING: the
 * server has; what it held is queued to be given back. */
mtype = { FREE, OPEN, ENDED, LEAVING };

/* What is on its way on a connection. Answers that teach the client nothing are not kept. */
mtype = { NOTHING, ACQUIRE, RELEASE, GRANTED };

typedef Connection {
    mtype state = FREE;
    mtype message = NOTHING;
    byte name;              /* of the message */
    byte amount;
    byte believed[NAMES];   /* what the client believes to hold: all that it was told, and has not begun to release */
    byte held[RECORDS]      /* the ledger: a holding where it is not 0 */
}

typedef Counter {
    bit used;
    byte name;
    byte consumption;
    bit current;            /* last used in the current window */
    bit in_ring
}

Connection connection[CONNECTIONS];
Counter counter[RECORDS];
byte holdings;
byte ring[RECORDS];         /* the oldest first; counted from its head */
byte ring_size;
byte sweep_left;
byte leaving[CONNECTIONS];  /* the queue, the first to be given back first */
byte leaving_size;

#ifdef UNFENCED
byte outdated[NAMES];       /* what clients believe whose connection the server has ended, and who have not looked */
#endif

hidden byte i, j, sum, number, steps, first;

/* ---- claims ---- */

/* The invariants of Store.audit, and what is promised to clients. After each step of the engine. */
inline check() {
    sum = 0;
    for (i : 0 .. RECORDS - 1) {
        sum = sum + counter[i].in_ring;
        number = 0;
        for (j : 0 .. CONNECTIONS - 1) {
            number = number + connection[j].held[i];
            assert(connection[j].held[i] == 0 || counter[i].used);      /* a record that was reclaimed has no holding */
            assert(connection[j].held[i] == 0 || connection[j].state != FREE)
        }
        assert(counter[i].consumption == number);                       /* the sum of the holdings */
        assert(counter[i].consumption <= LIMIT);                        /* never above the maximum */
        assert(!counter[i].in_ring || counter[i].used);
        assert(counter[i].consumption || counter[i].in_ring || !counter[i].used)    /* idle: in the ring, or gone */
    }
    assert(ring_size == sum && sweep_left <= ring_size);                /* at most once */
    assert(holdings <= HOLDINGS);
    for (i : 0 .. NAMES - 1) {
        sum = 0;
        for (j : 0 .. CONNECTIONS - 1) {
            sum = sum + connection[j].believed[i];
            assert(connection[j].believed[i] == 0 || connection[j].state == OPEN);
            find(i);                                                    /* what a client has, the ledger knows */
            if
            :: number < RECORDS -> assert(connection[j].believed[i] <= connection[j].held[number])
            :: else -> assert(connection[j].believed[i] == 0)
            fi
        }
#ifdef UNFENCED
        sum = sum + outdated[i];
#endif
        assert(sum <= LIMIT)                                            /* what live clients believe to hold */
    }
    sum = 0; i = 0; j = 0; number = 0; steps = 0; first = 0
}

/* ---- the engine: as the functions of these names ---- */

/* table_find: the counter of that name; RECORDS = none */
inline find(_name) {
    number = 0;
    do
    :: number < RECORDS && !(counter[number].used && counter[number].name == _name) -> number++
    :: else -> break
    od
}

inline ring_push(_number) {
    ring[ring_size] = _number;
    ring_size++;
    counter[_number].in_ring = 1
}

inline ring_pop() {
    assert(ring_size > 0);
    number = ring[0];
    for (i : 1 .. RECORDS - 1) {
        ring[i - 1] = ring[i]
    }
    ring[RECORDS - 1] = 0;
    ring_size--;
    if
    :: sweep_left > ring_size -> sweep_left = ring_size
    :: else
    fi;
    counter[number].in_ring = 0
}

inline counter_free(_number) {
    counter[_number].used = 0;
    counter[_number].name = 0;
    counter[_number].consumption = 0;
    counter[_number].current = 0
}

/* Returns in number: a free record; RECORDS = none. It may look at RECLAIM_STEPS counters of the ring. */
inline make_room() {
    steps = 0;
    do
    :: else ->
        number = 0;
        do
        :: number < RECORDS && counter[number].used -> number++
        :: else -> break
        od;
        if
        :: number < RECORDS || steps == RECLAIM_STEPS || ring_size == 0 -> break
        :: else
        fi;
        steps++;
        ring_pop();
#ifndef RECLAIM_HELD
        if
        :: counter[number].consumption -> skip
        :: else -> counter_free(number)
        fi
#else
        counter_free(number)
#endif
    od;
    if
    :: number == RECORDS && sweep_left == 0 -> sweep_left = ring_size
    :: else
    fi
}

#ifdef OVERRUN
#define LEDGER_IS_FULL false
#else
#define LEDGER_IS_FULL (holdings == HOLDINGS)
#endif

#ifdef WRAP     /* the sum, in words of two bits */
#define IS_TOO_MUCH(_resources) (((counter[number].consumption + _resources) & 3) > LIMIT)
#else
#define IS_TOO_MUCH(_resources) (counter[number].consumption > LIMIT - _resources)
#endif

inline counter_acquire(_connection, _name, _resources) {
    find(_name);
    if
    :: number == RECORDS && !LEDGER_IS_FULL ->
        make_room();
        if
        :: number < RECORDS ->
            counter[number].used = 1;
            counter[number].name = _name
        :: else
        fi
    :: number < RECORDS && (IS_TOO_MUCH(_resources) || !connection[_connection].held[number] && LEDGER_IS_FULL) ->
        number = RECORDS
    :: else
    fi;
    if
    :: number < RECORDS ->
        holdings = holdings + (connection[_connection].held[number] == 0);
        connection[_connection].held[number] = connection[_connection].held[number] + _resources;
        counter[number].consumption = counter[number].consumption + _resources;
        counter[number].current = 1;
        connection[_connection].message = GRANTED
    :: else ->
        answered(_connection)
    fi
}

inline counter_restore(_number, _resources) {
    assert(0 < _resources && _resources <= counter[_number].consumption);   /* nothing is given back twice */
    counter[_number].current = 1;
    counter[_number].consumption = counter[_number].consumption - _resources;
    if
#ifdef DROPS_IDLE
    :: counter[_number].consumption == 0 -> counter_free(_number)
#elif defined(PUSH_TWICE)
    :: counter[_number].consumption == 0 -> ring_push(_number)
#else
    :: counter[_number].consumption == 0 && !counter[_number].in_ring -> ring_push(_number)
#endif
    :: else
    fi
}

inline counter_release(_connection, _name, _resources) {
    find(_name);
    if
    :: number < RECORDS && connection[_connection].held[number] >= _resources ->
#ifndef DOUBLE_GIVE_BACK
        connection[_connection].held[number] = connection[_connection].held[number] - _resources;
        holdings = holdings - (connection[_connection].held[number] == 0);
#endif
        counter_restore(number, _resources)
    :: else
    fi;
    answered(_connection)
}

inline answered(_connection) {
    connection[_connection].message = NOTHING;
    connection[_connection].name = 0;
    connection[_connection].amount = 0
}

/* Returns in sum: how many holdings it has. */
inline count_holdings(_connection) {
    sum = 0;
    for (j : 0 .. RECORDS - 1) {
        sum = sum + (connection[_connection].held[j] != 0)
    }
}

/* Session.closed, from the connection's socket: the client has gone, or is made to go. */
inline connection_leave(_connection) {
    answered(_connection);
    for (j : 0 .. NAMES - 1) {
        connection[_connection].believed[j] = 0
    }
    count_holdings(_connection);
    if
    :: sum == 0 -> connection[_connection].state = FREE
    :: else ->
        leaving[leaving_size] = _connection;
        leaving_size++;
#ifdef FREE_EARLY
        connection[_connection].state = FREE
#else
        connection[_connection].state = LEAVING
#endif
    fi
}

/* The connection that leaves first has nothing any more: its number goes to the next. */
inline connection_free() {
    connection[first].state = FREE;
    leaving_size--;
    for (j : 1 .. leaving_size) {
        leaving[j - 1] = leaving[j]
    }
    leaving[leaving_size] = 0
}

inline give_back() {
    do
    :: steps > 0 && leaving_size ->
        first = leaving[0];
        number = 0;
        do
        :: number < RECORDS && connection[first].held[number] == 0 -> number++
        :: else -> break
        od;
        if
        :: number == RECORDS -> connection_free()
        :: else ->
            steps--;
            sum = connection[first].held[number];
            connection[first].held[number] = 0;
            holdings--;
            counter_restore(number, sum)
        fi
    :: else -> break
    od
}

inline sweep() {
    do
    :: steps > 0 && sweep_left > 0 ->
        steps--;
        sweep_left--;
        ring_pop();
        if
        :: counter[number].consumption -> skip
        :: else ->
            if
            :: counter[number].current -> ring_push(number)
            :: else -> counter_free(number)
            fi
        fi
    :: else -> break
    od
}

inline begin_window() {
    for (i : 0 .. RECORDS - 1) {
        counter[i].current = 0
    }
    sweep_left = ring_size
}

/* ---- who takes part ---- */

/* At the other end. It has one request under way at a time; what it sends may be refused. */
proctype Client(byte own) {
    byte name, amount;
    do
    :: d_step { connection[own].state == FREE ->
            connection[own].state = OPEN;
            check()
       }
    :: atomic { connection[own].state == OPEN && connection[own].message == NOTHING ->
            select(name : 0 .. NAMES - 1);
            select(amount : 1 .. RESOURCES);
            if
            :: connection[own].message = ACQUIRE
            :: connection[own].message = RELEASE;   /* it lets go of what it releases before it says so */
               if
               :: connection[own].believed[name] > amount ->
                    connection[own].believed[name] = connection[own].believed[name] - amount
               :: else -> connection[own].believed[name] = 0
               fi
            fi;
            connection[own].name = name;
            connection[own].amount = amount;
            name = 0; amount = 0
       }
    :: d_step { connection[own].state == OPEN && connection[own].message == GRANTED ->
            connection[own].believed[connection[own].name] =
                connection[own].believed[connection[own].name] + connection[own].amount;
            answered(own);
            check()
       }
    :: d_step { connection[own].state == OPEN ->    /* closes, or dies: a request of it may still arrive, no answer */
            connection[own].state = ENDED;
            for (j : 0 .. NAMES - 1) {
                connection[own].believed[j] = 0
            }
            if
            :: connection[own].message == GRANTED -> answered(own)
            :: else
            fi;
            check()
       }
    od
}

/* The server's end: Session.receive, eof and closed. */
proctype Socket(byte own) {
    do
    :: d_step { connection[own].message == ACQUIRE ->
            counter_acquire(own, connection[own].name, connection[own].amount);
            if
            :: connection[own].state == ENDED -> answered(own)
            :: else
            fi;
            check()
       }
    :: d_step { connection[own].message == RELEASE ->
            counter_release(own, connection[own].name, connection[own].amount);
            check()
       }
    :: d_step { connection[own].state == ENDED ->   /* after its requests, or a reset has overtaken them */
            connection_leave(own);
            check()
       }
    od
}

/* The server ends connections of its own accord: idle, out of bounds, told to. */
proctype Closer() {
    byte own;
    do
    :: atomic {
            select(own : 0 .. CONNECTIONS - 1);
            if
            :: connection[own].state == OPEN ->
#ifdef UNFENCED
                for (j : 0 .. NAMES - 1) {
                    outdated[j] = outdated[j] + connection[own].believed[j]
                }
#endif
                connection_leave(own);
                check()
            :: else
            fi;
            own = 0
       }
    od
}

/* Driver: Store.tick as long as Store.next_deadline says so. */
proctype Driver() {
    do
    :: d_step { leaving_size || sweep_left ->
            steps = SLICE_STEPS;
#ifdef SWEEP_FIRST
            sweep();
            give_back();
#else
            give_back();
            sweep();
#endif
            check()
       }
    od
}

/* Windows: turns at any moment. Nothing changes if all counters are of an earlier one, and the sweep has begun. */
proctype Windows() {
    do
    :: d_step { true -> begin_window(); check() }
    od
}

init {
    atomic {
        for (i : 0 .. CONNECTIONS - 1) {
            run Client(i);
            run Socket(i)
        }
        run Closer();
        run Driver();
        run Windows();
        i = 0
    }
}

/* What somebody had who has gone comes back: the server sees the end, and the queue comes to it. */
ltl comes_back {
    [] ((connection[0].state == ENDED || connection[0].state == LEAVING) -> <> (connection[0].state == FREE))
}
