/*
 * The leases of daemons that share the permits of one counter: who may grant, and when
 * (src/counterd/cluster/authority.lua), for spin.
 *
 * A call may be lost, or delayed until after the next one; its answer may be lost or late. A daemon may be slow, or stop
 * and continue: each of its steps comes as late as can be. A server fails, and the next one remembers anything. Time is a
 * small clock that ticks between any two steps. README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: COUNTS_FROM_ANSWER, NO_MARGIN, GRANTS_ON, SAME_NAME,
 * APPLIES_STALE, NEVER_RECOVERS, GIVES_WHILE_RECOVERING, BELIEVES_MEMORY, ENDS_WHILE_RECOVERING, NEVER_REAPS. UNFENCED
 * is no defect: README.md.
 */

#ifndef DAEMONS
#define DAEMONS 2
#endif
#define NAMES (DAEMONS + 1)    /* a daemon that has lost its lease needs another one */
#ifndef MAXIMUM
#define MAXIMUM 2       /* of the counter */
#endif
#ifndef LEASE
#define LEASE 2         /* ticks */
#endif
#define LAG 1           /* ticks that the clock of a daemon may lose in a lease */
#ifdef NO_MARGIN
#define MARGIN 0
#else
#define MARGIN 1        /* ticks by which a daemon ends its lease early, by its own clock */
#endif
#define HOLDS (LEASE - MARGIN + LAG)    /* so it ends after so many ticks at the latest */
#ifndef FAILOVERS
#define FAILOVERS 255   /* 255: any number */
#endif
#ifndef LATE
#define LATE 1          /* whether calls that were given up may be executed later */
#endif
#ifndef DEATH
#define DEATH 0         /* daemon 1 dies, and no call of daemon 0 is lost or late */
#endif

mtype = { IDLE, SENT, ANSWERED, REFUSED };      /* what the call of a daemon is; REFUSED: its lease is over */

typedef Call {
    byte name;
    bit first;              /* under that name */
    byte want;              /* rights; and those that its daemon goes on to grant from, until it is answered: */
    byte keep
}

typedef Daemon {
    byte name;
    bit named;
    bit leased;             /* was answered under that name, and does not know yet that its lease is over */
    bit called;             /* under that name */
    byte lease;             /* ticks for which it grants, at most */
    byte rights;            /* from which it grants; each may be in use */
    mtype state = IDLE;
    Call call;
    byte next;              /* ticks of the lease that the call under way gives */
    byte granted            /* the answer */
}

typedef Entry {             /* of a name, in the books of the authority */
    bit known;
    byte lease;             /* ticks that are left of it */
    byte rights
}

Daemon daemon[DAEMONS];
Entry book[NAMES];
Call old;                   /* was given up by its daemon, and may still be executed */
bit late;                   /* there is one; and: */
bit stale;                  /* a later one has been executed under the same name */
bit unheard;                /* the server is new, and was not called yet */
byte recovers;                /* ticks for which it still recovers */
byte failovers;
bit dead;                   /* daemon 1 never does anything again */
bit told;                   /* daemon 0 was answered since the last tick */

hidden byte i, j;
hidden short others, room, result;

#define LESSER(_a, _b) ((_a) < (_b) -> (_a) : (_b))
#define GREATER(_a, _b) ((_a) > (_b) -> (_a) : (_b))

/* ---- claims ---- */

#ifdef UNFENCED     /* daemons that are stopped, and do not know yet that their lease is over, count too */
#define GRANTS(_s) (daemon[_s].leased)
#else
#define GRANTS(_s) (daemon[_s].lease)
#endif

inline check() {
    others = 0;
    for (i : 0 .. DAEMONS - 1) {
        if
        :: GRANTS(i) ->
            others = others + daemon[i].rights;
            assert(recovers || unheard || (book[daemon[i].name].known &&
                book[daemon[i].name].rights >= daemon[i].rights))     /* who was reaped grants nothing */
        :: else
        fi
    }
    assert(others <= MAXIMUM);      /* no grant is above the maximum, nor could be */
    i = 0; j = 0; others = 0; room = 0; result = 0
}

/* ---- the authority: as the functions of these names ---- */

inline take_back(_name) {
    book[_name].known = 0;
    book[_name].rights = 0
}

/* Nobody waits for rights here. */
inline decide(_call) {
    others = 0;
    for (i : 0 .. NAMES - 1) {
        others = others + (i != _call.name -> book[i].rights : 0)
    }
#ifndef BELIEVES_MEMORY
    book[_call.name].rights = (recovers -> _call.keep : book[_call.name].rights);
#endif
#ifdef GIVES_WHILE_RECOVERING
    room = MAXIMUM - others;
#else
    room = (recovers -> 0 : MAXIMUM - others);
#endif
    room = GREATER(room, book[_call.name].rights);
    room = LESSER(room, _call.want);
    others = MAXIMUM - others;
    others = GREATER(others, _call.keep);
    book[_call.name].rights = LESSER(room, others)
}

#ifdef ENDS_WHILE_RECOVERING
#define ENDS_LEASES 1
#else
#define ENDS_LEASES (recovers == 0)
#endif
#define IS_OVER(_name, _first) (book[_name].known -> book[_name].lease == 0 : !(_first))

/* Returns in result: whether the call was executed. */
inline tick(_call, _stale) {
#ifndef NEVER_RECOVERS
    recovers = (unheard -> LEASE : recovers);
#endif
    unheard = 0;
#ifndef NEVER_REAPS
    j = NAMES;
    for (i : 0 .. NAMES - 1) {
        j = (j == NAMES && book[i].known && book[i].lease == 0 -> i : j)
    }
    if
    :: j < NAMES && ENDS_LEASES -> take_back(j)
    :: else
    fi;
#endif
    result = !(_stale) && !(ENDS_LEASES && IS_OVER(_call.name, _call.first));
    if
    :: result ->
        book[_call.name].known = 1;
        book[_call.name].lease = LEASE;
        decide(_call)
    :: else
    fi
}

inline execute(_own) {
    tick(daemon[_own].call, 0);
    if
    :: result ->
        stale = stale || (late && old.name == daemon[_own].name);
        daemon[_own].granted = book[daemon[_own].name].rights;
        daemon[_own].state = ANSWERED
    :: else ->
        assert(daemon[_own].lease == 0);   /* nobody loses a lease that it still grants in */
        daemon[_own].state = REFUSED
    fi;
    call_clear(daemon[_own].call)
}

/* ---- a daemon ---- */

inline call_clear(_call) {
    _call.name = 0;
    _call.first = 0;
    _call.want = 0;
    _call.keep = 0
}

inline call_end(_own) {
    daemon[_own].state = IDLE;
    daemon[_own].next = 0;
    daemon[_own].granted = 0;
    call_clear(daemon[_own].call)
}

inline old_clear() {
    late = 0;
    stale = 0;
    call_clear(old)
}

/* The call under way may be executed later. */
inline give_up(_own) {
    late = 1;
    old.name = daemon[_own].call.name;
    old.first = daemon[_own].call.first;
    old.want = daemon[_own].call.want;
    old.keep = daemon[_own].call.keep
}

#define HAS(_s, _name) (daemon[_s].named && daemon[_s].name == (_name))

/* Takes a name that nobody has had, as far as anybody knows. */
inline name_find(_own) {
    for (i : 0 .. NAMES - 1) {
        result = !daemon[_own].named && !book[i].known && !(late && old.name == i);
        for (j : 0 .. DAEMONS - 1) {
            result = result && !HAS(j, i)
        }
        if
        :: result -> daemon[_own].name = i; daemon[_own].named = 1
        :: else
        fi
    }
}

inline send(_own, _keep, _want) {
    daemon[_own].call.name = daemon[_own].name;
    daemon[_own].call.first = !daemon[_own].called;
    daemon[_own].call.want = _want;
    daemon[_own].call.keep = _keep;
#ifndef GRANTS_ON
    daemon[_own].rights = _keep;
#endif
    daemon[_own].called = 1;
    daemon[_own].next = HOLDS;
    daemon[_own].state = SENT
}

/* Its lease is over: it ends what its clients hold. */
inline lose(_own) {
    if
    :: LATE && daemon[_own].state == SENT && !late -> give_up(_own)
    :: else
    fi;
    call_end(_own);
    daemon[_own].leased = 0;
    daemon[_own].called = 0;
    daemon[_own].lease = 0;
    daemon[_own].rights = 0;
#ifdef SAME_NAME
    stale = 0     /* the numbers of its calls begin with 1 again */
#else
    daemon[_own].named = 0;
    daemon[_own].name = 0
#endif
}

inline answered(_own) {
    daemon[_own].leased = 1;
#ifdef COUNTS_FROM_ANSWER
    daemon[_own].lease = HOLDS;
#else
    daemon[_own].lease = daemon[_own].next;
#endif
    daemon[_own].rights = daemon[_own].granted;
    told = DEATH && (told || _own == 0);
    call_end(_own)
}

/* ---- who takes part ---- */

#define LIVES(_s) (!((_s) == 1 && dead))
#define IS_OVER_HERE(_s) (daemon[_s].leased && !daemon[_s].lease)

proctype Caller(byte own) {
    byte keep, want;
    do
    :: atomic { LIVES(own) && daemon[own].state == IDLE && !(daemon[own].leased && !daemon[own].lease) ->
            d_step { name_find(own) };
            if
            :: daemon[own].named ->
                select(keep : 0 .. daemon[own].rights);
                if
                :: want = keep
                :: want = MAXIMUM
                fi;
                d_step { send(own, keep, want) };
                keep = 0; want = 0
            :: else
            fi;
            d_step { check() }
       }
    :: d_step { LIVES(own) && daemon[own].state == ANSWERED -> answered(own); check() }
    :: d_step { LIVES(own) && (daemon[own].state == REFUSED || IS_OVER_HERE(own)) -> lose(own); check() }
    od
}

proctype Server(byte own) {
    do
    :: d_step { daemon[own].state == SENT -> execute(own); check() }
    od
}

#if !DEATH
/* The way to the authority and back. */
proctype Network(byte own) {
    do
    :: d_step { daemon[own].state != IDLE -> call_end(own); check() }      /* the call, or its answer, is lost */
#if LATE
    :: d_step { daemon[own].state == SENT && !late -> give_up(own); call_end(own); check() }
#endif
    od
}

#endif

#if LATE
proctype LateServer() {
    do
    :: d_step { late ->
#ifdef APPLIES_STALE
            tick(old, 0);
#else
            tick(old, stale);
#endif
            old_clear();
            check()
       }
    :: d_step { late -> old_clear(); check() }
    od
}
#endif

proctype Clock() {
    do
    :: d_step { told || !DEATH ->
            for (i : 0 .. DAEMONS - 1) {
                daemon[i].lease = daemon[i].lease - (daemon[i].lease > 0);
                daemon[i].next = daemon[i].next - (daemon[i].next > 0)
            }
            for (i : 0 .. NAMES - 1) {
                book[i].lease = book[i].lease - (book[i].lease > 0)
            }
            recovers = recovers - (recovers > 0);
            told = 0;
            check()
       }
    od
}

inline fail_over() {
    for (i : 0 .. NAMES - 1) {
        book[i].lease = 0
    }
    for (i : 0 .. DAEMONS - 1) {
        if
        :: daemon[i].state == SENT -> call_end(i)
        :: else
        fi
    }
    old_clear();
    recovers = 0;
    unheard = 1;
    failovers = failovers + (FAILOVERS < 255)
}

#if FAILOVERS
/* Another server takes over. It remembers a name, or not, or that it had all rights. */
proctype Failover(byte name) {
    do
    :: d_step { failovers < FAILOVERS -> fail_over(); check() }
    :: d_step { failovers < FAILOVERS && book[name].known -> take_back(name); fail_over(); check() }
    :: d_step { failovers < FAILOVERS && book[name].known -> book[name].rights = MAXIMUM; fail_over(); check() }
    od
}
#endif

#if DEATH
proctype Killer() {
    d_step { daemon[1].named -> dead = 1 }
}
#endif

init {
    atomic {
        for (i : 0 .. DAEMONS - 1) {
            daemon[i].name = i;
            daemon[i].named = 1;
            run Caller(i);
            run Server(i);
#if !DEATH
            run Network(i);
#endif
        }
        run Clock();
#if LATE
        run LateServer();
#endif
#if FAILOVERS
        for (i : 0 .. NAMES - 1) {
            run Failover(i)
        }
#endif
#if DEATH
        run Killer();
#endif
        i = 0
    }
}

/* What a dead daemon had comes back. */
ltl comes_back {
    [] (dead -> <> !book[daemon[1].name].known)
}
