/*
 * Takes of the counter protocol's engine that wait for several counters (src/counterd/protocols/counter/_takes.pxd and
 * _store.pyx, engine/fair.pxd), for spin.
 *
 * As in engine.pml each call into the engine is one indivisible step; what interleaves are these calls, the clients, and
 * the messages between them. README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: STAYS, LOSES, HALF, CROSSES, SWALLOWS, FORGETS_DEAD,
 * SLEEPS_AFTER_RELEASE, SLEEPS_AFTER_CANCEL, SLEEPS_AFTER_DEATH.
 */

#ifndef CONNECTIONS
#define CONNECTIONS 3   /* numbers, of those that leave too */
#endif
#define NAMES 2         /* counters: of the other there is one */
#ifndef FIRST
#define FIRST 2         /* maximum of the first */
#endif
#define MAXIMUM(_name) (_name == 0 -> FIRST : 1)
#define OF(_amounts, _name) (((_amounts) >> (2 * (_name))) & 3)     /* amounts of both, in two bits each */
#ifndef MOST
#define MOST 6          /* that a Take asks for: two of the first and one of the other */
#endif
#ifndef MOVES
#define MOVES 1         /* from one queue to another, after which a Take goes to the front */
#endif
#define REPLIES 2       /* that can be on their way to a client: of its Take, and of its Cancel */

mtype = { FREE, OPEN, ENDED, LEAVING };             /* what a connection is, as in engine.pml */
mtype = { NOTHING, TAKE, TRY, CANCEL, RELEASE };    /* what is on its way to the server; a TRY does not wait */
mtype = { GRANTED, REFUSED, CANCELLED, DONE, TOO_LATE };    /* and to the client */

typedef Connection {
    mtype state = FREE;
    mtype message = NOTHING;
    byte what;              /* of a RELEASE: amounts */
    byte asked;             /* by the Take that has no reply yet, as the client knows */
    bit cancels;            /* a Cancel has no reply yet */
    byte believed;          /* what the client believes to hold */
    byte held;              /* what it holds, as the ledger knows */
    byte wants;             /* by the Take that waits in the engine */
    byte queue;             /* in which it waits */
    byte moves;
    mtype reply[REPLIES];   /* the first to arrive first */
    byte replies
}

Connection connection[CONNECTIONS];
byte order[6];              /* of each queue, CONNECTIONS places: who waits in it, the first first */
byte waiters[NAMES];
bit ready[NAMES];           /* is to be served */
byte leaving[CONNECTIONS];
byte leaving_size;

hidden byte i, j, k, number, place, sum;

#define AT(_queue, _place) order[(_queue) * CONNECTIONS + (_place)]

/* ---- claims ---- */

/* After each step of the engine and of a client. */
inline check() {
    for (i : 0 .. NAMES - 1) {
        sum = 0; k = 0;
        for (j : 0 .. CONNECTIONS - 1) {
            sum = sum + OF(connection[j].held, i);
            k = k + OF(connection[j].believed, i)
        }
        assert(sum <= MAXIMUM(i) && k <= MAXIMUM(i));
        if
        :: waiters[i] > 0 ->
            assert(connection[AT(i, 0)].queue == i);
            assert(sum + OF(connection[AT(i, 0)].wants, i) > MAXIMUM(i) || ready[i])   /* nobody sleeps who need not */
        :: else
        fi
    }
    sum = 0;
    for (j : 0 .. CONNECTIONS - 1) {
        assert(connection[j].state != FREE || (connection[j].held == 0 && connection[j].wants == 0));
        assert(OF(connection[j].believed, 0) <= OF(connection[j].held, 0));
        assert(OF(connection[j].believed, 1) <= OF(connection[j].held, 1));
        assert(connection[j].believed == 0 || connection[j].state == OPEN);
        if
        :: connection[j].state == OPEN && connection[j].message == NOTHING && connection[j].replies == 0 ->
            assert(connection[j].believed == connection[j].held);       /* no grant is lost, none made twice */
            assert(connection[j].asked == connection[j].wants)          /* each Take gets its reply */
        :: else
        fi;
        sum = sum + (connection[j].wants != 0)
    }
    assert(waiters[0] + waiters[1] == sum);                             /* each that waits, in one queue */
    i = 0; j = 0; k = 0; number = 0; place = 0; sum = 0
}

/* A reply arrives: to what was asked, once. */
inline replied(_own) {
    if
    :: connection[_own].reply[0] == GRANTED ->
        assert(connection[_own].asked);
        connection[_own].believed = connection[_own].believed + connection[_own].asked;
        connection[_own].asked = 0
    :: connection[_own].reply[0] == REFUSED || connection[_own].reply[0] == CANCELLED ->
        assert(connection[_own].asked);
        assert(connection[_own].reply[0] == REFUSED || connection[_own].cancels);
        connection[_own].asked = 0
    :: connection[_own].reply[0] == DONE || connection[_own].reply[0] == TOO_LATE ->
        assert(connection[_own].cancels && connection[_own].asked == 0);    /* after that of its Take */
        connection[_own].cancels = 0
    fi;
    connection[_own].replies--;
    connection[_own].reply[0] = connection[_own].reply[1];
    connection[_own].reply[1] = 0
}

/* ---- the engine: as the functions of these names ---- */

inline post_to(_connection, _reply) {
    assert(connection[_connection].replies < REPLIES);
    if
    :: connection[_connection].state == OPEN ->
        connection[_connection].reply[connection[_connection].replies] = _reply;
        connection[_connection].replies++
    :: else     /* nobody reads it */
    fi
}

/* Returns in sum: how much is held of it. */
inline consumption(_name) {
    sum = 0;
    for (j : 0 .. CONNECTIONS - 1) {
        sum = sum + OF(connection[j].held, _name)
    }
}

#define IS_SHORT(_amounts) (sum + OF(_amounts, number) > MAXIMUM(number))

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
    connection[_connection].wants = 0;
    connection[_connection].moves = 0
}

#ifdef SLEEPS_AFTER_RELEASE
#define RELEASE_WAKES 0
#else
#define RELEASE_WAKES 1
#endif
#ifdef SLEEPS_AFTER_CANCEL
#define CANCEL_WAKES 0
#else
#define CANCEL_WAKES 1
#endif
#ifdef SLEEPS_AFTER_DEATH
#define DEATH_WAKES 0
#else
#define DEATH_WAKES 1
#endif

/* Returns in number: the first item that is not there, or that somebody waits for; NAMES = none. */
inline takes_decide(_wanted) {
    number = 0;
    do
    :: number < NAMES ->
        consumption(number);
        if
        :: OF(_wanted, number) && (IS_SHORT(_wanted) || waiters[number] > 0) -> break
        :: else -> number++
        fi
    :: else -> break
    od
}

inline take(_connection, _waits) {
    takes_decide(connection[_connection].asked);
    if
    :: number == NAMES ->
        connection[_connection].held = connection[_connection].held + connection[_connection].asked;
        post_to(_connection, GRANTED)
    :: number < NAMES && _waits ->
        connection[_connection].wants = connection[_connection].asked;
        waiter_insert(_connection, number)
    :: else -> post_to(_connection, REFUSED)
    fi
}

inline cancel(_connection) {
    if
    :: connection[_connection].wants ->
        take_end(_connection, CANCEL_WAKES);
#ifndef SWALLOWS
        post_to(_connection, CANCELLED);
#endif
        post_to(_connection, DONE)
#ifdef CROSSES
    :: connection[_connection].wants == 0 && connection[_connection].replies ->
        connection[_connection].reply[0] = CANCELLED;   /* in place of its grant */
        post_to(_connection, DONE)
#endif
    :: else -> post_to(_connection, TOO_LATE)
    fi
}

inline wake(_what) {
    for (k : 0 .. NAMES - 1) {
        if
        :: RELEASE_WAKES && OF(_what, k) && waiters[k] > 0 -> ready[k] = 1
        :: else
        fi
    }
}

inline counter_release(_connection) {
    connection[_connection].held = connection[_connection].held - connection[_connection].what;
    wake(connection[_connection].what)
}

#define IS_BEHIND(_c) (connection[_c].queue != number && waiters[number] > 0 && connection[_c].moves < MOVES)
#ifdef HALF     /* only the item that it waits for is looked at again */
#define BLOCKS(_c) (connection[_c].queue == number && IS_SHORT(connection[_c].wants))
#else
#define BLOCKS(_c) (IS_SHORT(connection[_c].wants) || IS_BEHIND(_c))
#endif

/* Returns in number: the first item that is not there, or in whose queue somebody else is first; NAMES = none. */
inline take_try(_connection) {
    number = 0;
    do
    :: number < NAMES ->
        consumption(number);
        if
        :: OF(connection[_connection].wants, number) && BLOCKS(_connection) -> break
        :: else -> number++
        fi
    :: else -> break
    od
}

/* Serves the first of a queue; the queue stays to be served unless that one has to go on waiting. */
inline serve_queue(_queue) {
    if
    :: waiters[_queue] == 0 -> ready[_queue] = 0
    :: else ->
        first = AT(_queue, 0);
        number = NAMES;
        if
        :: connection[first].state == LEAVING -> take_end(first, 1)
        :: else ->
            take_try(first);
            if
            :: number == NAMES ->
#ifndef LOSES
                connection[first].held = connection[first].held + connection[first].wants;
#endif
#ifndef STAYS
                take_end(first, 1);
#endif
                post_to(first, GRANTED)
            :: number == _queue -> ready[_queue] = 0
            :: else ->
                waiter_extract(first, 1);
                connection[first].moves = connection[first].moves + (connection[first].moves <= MOVES);
                sum = number;       /* waiter_insert() changes place */
                waiter_insert(first, sum);
                ready[sum] = 1
            fi
        fi
    fi;
    first = 0
}

/* Session.closed, from the connection's socket: the client has gone, or is made to go. */
inline connection_leave(_connection) {
    connection[_connection].message = NOTHING;
    connection[_connection].what = 0;
    connection[_connection].asked = 0;
    connection[_connection].cancels = 0;
    connection[_connection].believed = 0;
    connection[_connection].replies = 0;
    connection[_connection].reply[0] = 0;
    connection[_connection].reply[1] = 0;
    if
    :: connection[_connection].held == 0 && connection[_connection].wants == 0 -> connection[_connection].state = FREE
    :: else ->
        connection[_connection].state = LEAVING;
        leaving[leaving_size] = _connection;
        leaving_size++
    fi
}

/* A step for each: what the first of them waits for, then each thing that it holds; then its number is free. */
inline takes_left() {
    first = leaving[0];
    if
#ifndef FORGETS_DEAD
    :: connection[first].wants -> take_end(first, DEATH_WAKES)
#endif
    :: OF(connection[first].held, 0) && !connection[first].wants ->
        connection[first].held = connection[first].held - OF(connection[first].held, 0);
        wake(1)
    :: connection[first].held == 4 && !connection[first].wants -> connection[first].held = 0; wake(4)
    :: else ->
        connection[first].state = FREE;
        leaving_size--;
        for (k : 1 .. CONNECTIONS - 1) {
            leaving[k - 1] = leaving[k]
        }
        leaving[CONNECTIONS - 1] = 0
    fi;
    first = 0
}

/* ---- who takes part ---- */

/* It has one Take at a time without a reply; while that waits, it cancels it, or gives back what it has. */
proctype Client(byte own) {
    byte wanted;
    do
    :: d_step { connection[own].state == FREE -> connection[own].state = OPEN; check() }
    :: atomic { connection[own].state == OPEN && connection[own].message == NOTHING ->
            select(wanted : 1 .. MOST);
            if
            :: OF(wanted, 0) <= FIRST && !connection[own].asked && !connection[own].cancels ->
                connection[own].asked = wanted;
                if
                :: connection[own].message = TAKE
                :: connection[own].message = TRY
                fi
            :: connection[own].asked && !connection[own].cancels ->
                connection[own].cancels = 1;
                connection[own].message = CANCEL
            :: OF(wanted, 0) <= OF(connection[own].believed, 0) && OF(wanted, 1) <= OF(connection[own].believed, 1) ->
                connection[own].what = wanted;
                connection[own].believed = connection[own].believed - wanted;
                connection[own].message = RELEASE   /* it lets go of what it releases before it says so */
            :: else
            fi;
            wanted = 0
       }
    :: d_step { connection[own].state == OPEN && connection[own].replies > 0 -> replied(own); check() }
    :: d_step { connection[own].state == OPEN ->    /* closes, or dies: a request of it may still arrive, no reply */
            connection[own].state = ENDED;
            connection[own].believed = 0;
            connection[own].replies = 0;
            connection[own].reply[0] = 0;
            connection[own].reply[1] = 0;
            check()
       }
    od
}

/* The server's end: Session.receive, eof and closed. */
proctype Socket(byte own) {
    do
    :: d_step { connection[own].message == TAKE || connection[own].message == TRY ->
            take(own, connection[own].message == TAKE);
            connection[own].message = NOTHING;
            check()
       }
    :: d_step { connection[own].message == CANCEL ->
            cancel(own);
            connection[own].message = NOTHING;
            check()
       }
    :: d_step { connection[own].message == RELEASE ->
            counter_release(own);
            connection[own].message = NOTHING;
            connection[own].what = 0;
            check()
       }
    :: d_step { connection[own].state == ENDED ->   /* after its requests, or a reset has overtaken them */
            connection_leave(own);
            check()
       }
    :: d_step { connection[own].state != LEAVING && connection[own].wants ->    /* its time is over */
            take_end(own, CANCEL_WAKES);
            post_to(own, REFUSED);
            check()
       }
    od
}

/* The server ends a connection of its own accord: a full socket, a drain, told to. Its client sees that at once. */
proctype Closer() {
    byte own;
    do
    :: atomic {
            select(own : 0 .. CONNECTIONS - 1);
            if
            :: connection[own].state == OPEN -> connection_leave(own); check()
            :: else
            fi;
            own = 0
       }
    od
}

/* Store.tick, as long as Store.next_deadline says so: the two parts of its work get their turns in any order. */
proctype Leaver() {
    byte first;
    do
    :: d_step { leaving_size -> takes_left(); check() }
    od
}

proctype Server() {
    byte first;
    do
    :: d_step { ready[0] -> serve_queue(0); check() }
    :: d_step { ready[1] -> serve_queue(1); check() }
    od
}

init {
    atomic {
        for (i : 0 .. CONNECTIONS - 1) {
            run Client(i);
            run Socket(i)
        }
        run Closer();
        run Leaver();
        run Server();
        i = 0
    }
}

/* What somebody had who has gone comes back, and nobody waits for it any more. */
ltl comes_back {
    [] ((connection[0].state == ENDED || connection[0].state == LEAVING) -> <> (connection[0].state == FREE))
}
