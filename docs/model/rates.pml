/*
 * Takes of a rate and of a permit, charges, and Settle (src/counterd/protocols/counter/_takes.pxd, _rates.pxd,
 * _charges.pxd and _store.pyx), for spin.
 *
 * Time goes on in ticks; one unit of the rate comes back at each. Each call into the engine is one indivisible step.
 * Books of what was used are kept beside the engine: they note at once that the rate is full, and the engine only when
 * it looks. README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: REFUNDS_VOID, FORGETS_FULL, FORGETS_EMPTY, FORGIVES, TWICE,
 * NO_REFUND, HALF, FREES_PINNED, UNTIMED, SLEEPS_AT_FIRST, SLEEPS_AFTER_SETTLE, SLEEPS_AFTER_CANCEL, PASSES.
 */

#ifndef CONNECTIONS
#define CONNECTIONS 2   /* 2 or 3 */
#endif
#ifndef BURST
#define BURST 2
#endif
#ifndef PERMITS
#define PERMITS 1       /* the maximum of the counter */
#endif
#ifndef MORE
#define MORE 1          /* units that are used beyond a charge, at most */
#endif
#define MOVES 1         /* from one queue to another, after which a Take goes to the front */
#define PERMIT 0        /* the items of a Take, and their queues */
#define RATE 1
#define ITEMS 2

mtype = { FREE, OPEN, LEAVING };            /* what a connection is */
mtype = { FINAL, CHARGED, REFUNDED };       /* what a death does to what was taken; FINAL: nor can it be settled */

typedef Connection {
    mtype state = FREE;
    byte wants[ITEMS];      /* by the Take that waits */
    mtype fate = FINAL;     /* of its units */
    byte queue;             /* in which it waits */
    byte moves;
    bit held;               /* a permit */
    byte charge;            /* units that can be settled; 0: none */
    bit refunds;            /* at its death */
    bit stale;              /* the engine knows that the rate has been full since */
    byte counted;           /* units of the charge in the books */
    bit over                /* they have come back with time */
}

Connection connection[CONNECTIONS];
byte order[6];              /* of each queue, CONNECTIONS places: who waits in it, the first first */
byte waiters[ITEMS];
bit ready[ITEMS];           /* is to be served */
byte due;                   /* ticks until the timer of the rate's queue wakes it; 0: not armed */
bit exists;                 /* the rate has a record */
byte debt;                  /* units of the rate that are not there, as the engine knows */
byte owed;                  /* likewise in the books: used since the rate was full, less those that came back since */

hidden byte i, j, k, number, place, held;

#define AT(_queue, _place) order[(_queue) * CONNECTIONS + (_place)]
#define WAITS(_c) (connection[_c].wants[PERMIT] || connection[_c].wants[RATE])
#define LESS(_from, _units) ((_from) > (_units) -> (_from) - (_units) : 0)
#define IS_SHORT(_item, _amount) (_item == PERMIT -> held + _amount > PERMITS : debt + _amount > BURST)

/* ---- claims ---- */

inline count_held() {
    held = 0;
    for (j : 0 .. CONNECTIONS - 1) {
        held = held + connection[j].held
    }
}

inline check() {
    count_held();
    assert(held <= PERMITS);
    assert(debt == owed);                                               /* exactly what the books say */
    k = 0;
    for (j : 0 .. CONNECTIONS - 1) {
        assert(connection[j].charge == connection[j].counted);          /* each charge is settled once, or ends */
        assert(exists || connection[j].wants[RATE] == 0);
        assert(connection[j].state != FREE || !(WAITS(j) || connection[j].held || connection[j].charge));
        k = k + WAITS(j)
    }
    assert(exists || debt == 0);
    assert(waiters[PERMIT] + waiters[RATE] == k);                       /* each that waits, in one queue */
    for (i : 0 .. ITEMS - 1) {
        if
        :: waiters[i] > 0 ->
            k = connection[AT(i, 0)].wants[i];
            assert(connection[AT(i, 0)].queue == i && k);
            assert(IS_SHORT(i, k) || ready[i]);                         /* nobody sleeps who need not */
            assert(i == PERMIT || ready[i] || (due && due <= debt + k - BURST))     /* and it is woken in time */
        :: else
        fi
    }
    i = 0; j = 0; k = 0; number = 0; place = 0; held = 0
}

/* ---- the books ---- */

inline book_full() {
    if
    :: owed == 0 ->
        for (j : 0 .. CONNECTIONS - 1) {
            connection[j].over = (connection[j].counted > 0)
        }
    :: else
    fi
}

inline book_end(_connection) {
    connection[_connection].counted = 0;
    connection[_connection].over = 0
}

inline book_grant(_connection, _units, _fate) {
    owed = owed + _units;
    assert(owed <= BURST || !_units);   /* never more than the limit */
    if
    :: _units && _fate != FINAL -> connection[_connection].counted = _units
    :: else
    fi
}

inline book_use(_connection, _used) {
    if
    :: _used >= connection[_connection].counted -> owed = owed + _used - connection[_connection].counted
    :: _used < connection[_connection].counted && !connection[_connection].over ->
        owed = LESS(owed, connection[_connection].counted - _used)
    :: else
    fi;
    book_end(_connection);
    book_full()
}

/* ---- the engine: as the functions of these names ---- */

/* All earlier charges are of units that have come back. */
inline note_full() {
    for (j : 0 .. CONNECTIONS - 1) {
        connection[j].stale = (connection[j].charge > 0)
    }
}

inline rate_create() {
    exists = 1;
    note_full()
}

inline rate_end() {
    exists = 0
}

inline rate_grant(_connection, _units, _fate) {
#ifndef FORGETS_EMPTY
    if
    :: debt == 0 -> note_full()
    :: else
    fi;
#endif
    debt = debt + _units;
    if
    :: _fate != FINAL ->
        connection[_connection].charge = _units;
        connection[_connection].refunds = (_fate == REFUNDED);
        connection[_connection].stale = 0
    :: else
    fi
}

inline takes_grant(_connection, _permit, _units, _fate) {
    connection[_connection].held = connection[_connection].held | _permit;
    if
    :: _units -> rate_grant(_connection, _units, _fate)
    :: else
    fi;
    book_grant(_connection, _units, _fate)
}

inline charge_end(_connection) {
    connection[_connection].charge = 0;
    connection[_connection].refunds = 0;
    connection[_connection].stale = 0
}

#ifdef REFUNDS_VOID
#define IS_VOID(_c) 0
#else
#define IS_VOID(_c) connection[_c].stale
#endif

inline charge_apply(_connection, _used) {
#ifndef FORGETS_FULL
    if
    :: exists && debt == 0 -> note_full()
    :: else
    fi;
#endif
    if
    :: exists && !(_used < connection[_connection].charge && IS_VOID(_connection)) ->
        debt = (_used >= connection[_connection].charge -> debt + _used - connection[_connection].charge :
            LESS(debt, connection[_connection].charge - _used));
#ifndef SLEEPS_AFTER_SETTLE
        ready[RATE] = (ready[RATE] || waiters[RATE] > 0)
#endif
    :: else
    fi
}

inline take_settle(_connection, _used) {
    if
#ifndef FORGIVES
    :: !exists && _used > connection[_connection].charge -> rate_create()
#endif
    :: else
    fi;
    charge_apply(_connection, _used);
#ifndef TWICE
    charge_end(_connection);
#endif
    book_use(_connection, _used)
}

inline charge_leave(_connection) {
    if
    :: connection[_connection].refunds ->
#ifndef NO_REFUND
        charge_apply(_connection, 0);
#endif
        book_use(_connection, 0)
    :: else -> book_end(_connection)
    fi;
    charge_end(_connection)
}

/* At the end, or after MOVES at the front. */
inline waiter_insert(_connection, _queue) {
    place = waiters[_queue];
    if
    :: connection[_connection].moves > MOVES ->
        do
        :: place > 0 -> AT(_queue, place) = AT(_queue, place - 1); place--
        :: else -> break
        od
    :: else
    fi;
    AT(_queue, place) = _connection;
    waiters[_queue]++;
    connection[_connection].queue = _queue
}

/* Who was behind the first may be served now: _wakes says so. */
inline waiter_extract(_connection, _wakes) {
    k = connection[_connection].queue;
    place = 0;
    do
    :: AT(k, place) != _connection -> place++
    :: else -> break
    od;
    if
    :: place == 0 && _wakes -> ready[k] = 1
    :: else
    fi;
    waiters[k]--;
    do
    :: place < waiters[k] -> AT(k, place) = AT(k, place + 1); place++
    :: else -> break
    od;
    AT(k, place) = 0;
    connection[_connection].queue = 0
}

inline take_end(_connection, _wakes) {
    waiter_extract(_connection, _wakes);
    connection[_connection].wants[PERMIT] = 0;
    connection[_connection].wants[RATE] = 0;
    connection[_connection].fate = FINAL;
    connection[_connection].moves = 0
}

#ifdef SLEEPS_AFTER_CANCEL
#define CANCEL_WAKES 0
#else
#define CANCEL_WAKES 1
#endif
#ifdef SLEEPS_AT_FIRST
#define FIRST_WAKES 0
#else
#define FIRST_WAKES 1
#endif
#ifdef PASSES
#define IS_AWAITED(_item) 0
#else
#define IS_AWAITED(_item) (waiters[_item] > 0)
#endif

/* Returns in number: the first item that is not there, or that somebody waits for; ITEMS = none. */
inline takes_decide(_permit, _units) {
    count_held();
    if
    :: _units && !exists -> rate_create()
    :: else
    fi;
    number = ITEMS;
    if
    :: _units && (IS_SHORT(RATE, _units) || IS_AWAITED(RATE)) -> number = RATE
    :: else
    fi;
    if
    :: _permit && (IS_SHORT(PERMIT, 1) || IS_AWAITED(PERMIT)) -> number = PERMIT
    :: else
    fi
}

inline take_wait(_connection, _permit, _units, _fate) {
    connection[_connection].wants[PERMIT] = _permit;
    connection[_connection].wants[RATE] = _units;
    connection[_connection].fate = _fate;
    waiter_insert(_connection, number);
    if
    :: AT(number, 0) == _connection && FIRST_WAKES -> ready[number] = 1     /* to note when it is there */
    :: else
    fi
}

inline take(_connection, _permit, _units, _fate, _waits) {
    takes_decide(_permit, _units);
    if
    :: number == ITEMS -> takes_grant(_connection, _permit, _units, _fate)
    :: number < ITEMS && _waits -> take_wait(_connection, _permit, _units, _fate)
    :: else
    fi
}

#define IS_BEHIND(_c, _item) (connection[_c].queue != _item && waiters[_item] > 0 && connection[_c].moves < MOVES)
#ifdef HALF     /* only the item that it waits for is looked at again */
#define BLOCKS(_c, _item) (connection[_c].queue == _item && IS_SHORT(_item, connection[_c].wants[_item]))
#else
#define BLOCKS(_c, _item) (IS_SHORT(_item, connection[_c].wants[_item]) || IS_BEHIND(_c, _item))
#endif

/* Returns in number: the first item that is not there, or in whose queue somebody else is first; ITEMS = none. */
inline take_try(_connection) {
    count_held();
    number = 0;
    do
    :: number < ITEMS ->
        if
        :: connection[_connection].wants[number] && BLOCKS(_connection, number) -> break
        :: else -> number++
        fi
    :: else -> break
    od
}

/* Serves the first of a queue; the queue stays to be served unless that one has to go on waiting. */
inline serve_queue(_queue) {
    if
    :: waiters[_queue] == 0 ->
        ready[_queue] = 0;
        due = (_queue == RATE -> 0 : due)
    :: else ->
        first = AT(_queue, 0);
        number = ITEMS;
        if
        :: connection[first].state == LEAVING -> take_end(first, 1)
        :: else ->
            take_try(first);
            if
            :: number == ITEMS ->
                takes_grant(
                    first, connection[first].wants[PERMIT], connection[first].wants[RATE], connection[first].fate
                );
                take_end(first, 1)
            :: number == _queue ->
                ready[_queue] = 0;
#ifndef UNTIMED
                due = (_queue == RATE -> debt + connection[first].wants[RATE] - BURST : due)
#endif
            :: else ->
                waiter_extract(first, 1);
                connection[first].moves = connection[first].moves + (connection[first].moves <= MOVES);
                held = number;      /* waiter_insert() changes place */
                waiter_insert(first, held);
                ready[held] = 1
            fi
        fi
    fi;
    first = 0
}

inline counter_release(_connection) {
    connection[_connection].held = 0;
    ready[PERMIT] = (ready[PERMIT] || waiters[PERMIT] > 0)
}

/* ---- who takes part ---- */

/* It has one Take that waits, and one charge, at a time. */
proctype Client(byte own) {
    byte units;
    bit permit, waits;
    mtype fate = FINAL;
    do
    :: d_step { connection[own].state == FREE -> connection[own].state = OPEN; check() }
    :: atomic { connection[own].state == OPEN && !WAITS(own) ->
            select(units : 0 .. BURST);
            select(permit : 0 .. PERMITS);
            if
            :: units && !connection[own].charge -> fate = CHARGED
            :: units && !connection[own].charge -> fate = REFUNDED
            :: true
            fi;
            if
            :: waits = 1
            :: true
            fi;
            d_step {
                if
                :: (units || permit) && !(permit && connection[own].held) ->
                    take(own, permit, units, fate, waits);
                    check()
                :: else
                fi;
                units = 0; permit = 0; fate = FINAL; waits = 0
            }
       }
    :: atomic { connection[own].state == OPEN && connection[own].charge ->
            select(units : 0 .. BURST + MORE);
            d_step {
                if
                :: units <= connection[own].charge + MORE -> take_settle(own, units); check()
                :: else
                fi;
                units = 0
            }
       }
    :: d_step { connection[own].state == OPEN && connection[own].held -> counter_release(own); check() }
    :: d_step { connection[own].state == OPEN && WAITS(own) -> take_end(own, CANCEL_WAKES); check() }
    :: d_step { connection[own].state == OPEN -> connection[own].state = LEAVING; check() }
#ifdef PATIENT
    :: WAITS(own) -> skip       /* it need not do anything */
#endif
    od
}

/* The server's end, with a step for each thing that somebody had who has gone; and what time ends. */
proctype Socket(byte own) {
    do
    :: d_step { connection[own].state == LEAVING ->
            if
            :: WAITS(own) -> take_end(own, 1)
            :: !WAITS(own) && connection[own].charge -> charge_leave(own)
            :: !WAITS(own) && !connection[own].charge && connection[own].held -> counter_release(own)
            :: else -> connection[own].state = FREE
            fi;
            check()
       }
    :: d_step { connection[own].state == OPEN && connection[own].charge ->  /* it can no longer be settled */
            charge_end(own); book_end(own); check() }
#ifndef PATIENT
    :: d_step { connection[own].state == OPEN && WAITS(own) ->              /* it has waited long enough */
            take_end(own, CANCEL_WAKES); check() }
#endif
    od
}

/* A tick. At any time after it, what is due is served, and the record of a full rate is freed. */
proctype Clock() {
    do
    :: d_step { debt > 0 || due > 0 ->
            debt = LESS(debt, 1);
            owed = LESS(owed, 1);
            book_full();
            ready[RATE] = (ready[RATE] || due == 1);
            due = LESS(due, 1);
            check()
       }
    od
}

#ifdef FREES_PINNED
#define IS_PINNED 0
#else
#define IS_PINNED (connection[0].wants[RATE] || connection[1].wants[RATE] || connection[CONNECTIONS - 1].wants[RATE])
#endif

proctype Sweeper() {
    do
    :: d_step { exists && debt == 0 && !IS_PINNED -> rate_end(); check() }
    od
}

proctype Server(byte queue) {
    byte first;
    do
    :: d_step { ready[queue] -> serve_queue(queue); check() }
    od
}

init {
    atomic {
        for (i : 0 .. CONNECTIONS - 1) {
            run Client(i);
            run Socket(i)
        }
        run Clock();
        run Sweeper();
        run Server(PERMIT);
        run Server(RATE);
        i = 0
    }
}

/* Nobody waits for ever. */
ltl is_served {
    [] ((connection[0].wants[0] || connection[0].wants[1]) -> <> !(connection[0].wants[0] || connection[0].wants[1]))
}
