/*
 * The leases of sidecars that share the permits of one counter: who may grant, and when
 * (src/counterd/cluster/authority.lua), for spin.
 *
 * A call may be lost, or delayed until after the next one; its answer may be lost or late. A sidecar may be slow, or stop
 * and continue: each of its steps comes as late as can be. A server fails, and the next one remembers anything. Time is a
 * small clock that ticks between any two steps. README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: COUNTS_FROM_ANSWER, NO_MARGIN, GRANTS_ON, SAME_NAME,
 * APPLIES_STALE, NEVER_LEARNS, GIVES_WHILE_LEARNING, BELIEVES_MEMORY, ENDS_WHILE_LEARNING, NEVER_REAPS. UNFENCED is no
 * defect: README.md.
 */

#ifndef SIDECARS
#define SIDECARS 2
#endif
#define NAMES (SIDECARS + 1)    /* a sidecar that has lost its lease needs another one */
#ifndef MAXIMUM
#define MAXIMUM 2       /* of the counter */
#endif
#ifndef LEASE
#define LEASE 2         /* ticks */
#endif
#define LAG 1           /* ticks that the clock of a sidecar may lose in a lease */
#ifdef NO_MARGIN
#define MARGIN 0
#else
#define MARGIN 1        /* ticks by which a sidecar ends its lease early, by its own clock */
#endif
#define HOLDS (LEASE - MARGIN + LAG)    /* so it ends after so many ticks at the latest */
#ifndef FAILOVERS
#define FAILOVERS 255   /* 255: any number */
#endif
#ifndef LATE
#define LATE 1          /* whether calls that were given up may be executed later */
#endif
#ifndef DEATH
#define DEATH 0         /* sidecar 1 dies, and no call of sidecar 0 is lost or late */
#endif

mtype = { IDLE, SENT, ANSWERED, REFUSED };      /* what the call of a sidecar is; REFUSED: its lease is over */

typedef Call {
    byte name;
    bit first;              /* under that name */
    byte want;              /* rights; and those that its sidecar goes on to grant from, until it is answered: */
    byte keep
}

typedef Sidecar {
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

Sidecar sidecar[SIDECARS];
Entry book[NAMES];
Call old;                   /* was given up by its sidecar, and may still be executed */
bit late;                   /* there is one; and: */
bit stale;                  /* a later one has been executed under the same name */
bit unheard;                /* the server is new, and was not called yet */
byte learns;                /* ticks for which it still learns */
byte failovers;
bit dead;                   /* sidecar 1 never does anything again */
bit told;                   /* sidecar 0 was answered since the last tick */

hidden byte i, j;
hidden short others, room, result;

#define LESSER(_a, _b) ((_a) < (_b) -> (_a) : (_b))
#define GREATER(_a, _b) ((_a) > (_b) -> (_a) : (_b))

/* ---- claims ---- */

#ifdef UNFENCED     /* sidecars that are stopped, and do not know yet that their lease is over, count too */
#define GRANTS(_s) (sidecar[_s].leased)
#else
#define GRANTS(_s) (sidecar[_s].lease)
#endif

inline check() {
    others = 0;
    for (i : 0 .. SIDECARS - 1) {
        if
        :: GRANTS(i) ->
            others = others + sidecar[i].rights;
            assert(learns || unheard || (book[sidecar[i].name].known &&
                book[sidecar[i].name].rights >= sidecar[i].rights))     /* who was reaped grants nothing */
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
    book[_call.name].rights = (learns -> _call.keep : book[_call.name].rights);
#endif
#ifdef GIVES_WHILE_LEARNING
    room = MAXIMUM - others;
#else
    room = (learns -> 0 : MAXIMUM - others);
#endif
    room = GREATER(room, book[_call.name].rights);
    room = LESSER(room, _call.want);
    others = MAXIMUM - others;
    others = GREATER(others, _call.keep);
    book[_call.name].rights = LESSER(room, others)
}

#ifdef ENDS_WHILE_LEARNING
#define ENDS_LEASES 1
#else
#define ENDS_LEASES (learns == 0)
#endif
#define IS_OVER(_name, _first) (book[_name].known -> book[_name].lease == 0 : !(_first))

/* Returns in result: whether the call was executed. */
inline tick(_call, _stale) {
#ifndef NEVER_LEARNS
    learns = (unheard -> LEASE : learns);
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
    tick(sidecar[_own].call, 0);
    if
    :: result ->
        stale = stale || (late && old.name == sidecar[_own].name);
        sidecar[_own].granted = book[sidecar[_own].name].rights;
        sidecar[_own].state = ANSWERED
    :: else ->
        assert(sidecar[_own].lease == 0);   /* nobody loses a lease that it still grants in */
        sidecar[_own].state = REFUSED
    fi;
    call_clear(sidecar[_own].call)
}

/* ---- a sidecar ---- */

inline call_clear(_call) {
    _call.name = 0;
    _call.first = 0;
    _call.want = 0;
    _call.keep = 0
}

inline call_end(_own) {
    sidecar[_own].state = IDLE;
    sidecar[_own].next = 0;
    sidecar[_own].granted = 0;
    call_clear(sidecar[_own].call)
}

inline old_clear() {
    late = 0;
    stale = 0;
    call_clear(old)
}

/* The call under way may be executed later. */
inline give_up(_own) {
    late = 1;
    old.name = sidecar[_own].call.name;
    old.first = sidecar[_own].call.first;
    old.want = sidecar[_own].call.want;
    old.keep = sidecar[_own].call.keep
}

#define HAS(_s, _name) (sidecar[_s].named && sidecar[_s].name == (_name))

/* Takes a name that nobody has had, as far as anybody knows. */
inline name_find(_own) {
    for (i : 0 .. NAMES - 1) {
        result = !sidecar[_own].named && !book[i].known && !(late && old.name == i);
        for (j : 0 .. SIDECARS - 1) {
            result = result && !HAS(j, i)
        }
        if
        :: result -> sidecar[_own].name = i; sidecar[_own].named = 1
        :: else
        fi
    }
}

inline send(_own, _keep, _want) {
    sidecar[_own].call.name = sidecar[_own].name;
    sidecar[_own].call.first = !sidecar[_own].called;
    sidecar[_own].call.want = _want;
    sidecar[_own].call.keep = _keep;
#ifndef GRANTS_ON
    sidecar[_own].rights = _keep;
#endif
    sidecar[_own].called = 1;
    sidecar[_own].next = HOLDS;
    sidecar[_own].state = SENT
}

/* Its lease is over: it ends what its clients hold. */
inline lose(_own) {
    if
    :: LATE && sidecar[_own].state == SENT && !late -> give_up(_own)
    :: else
    fi;
    call_end(_own);
    sidecar[_own].leased = 0;
    sidecar[_own].called = 0;
    sidecar[_own].lease = 0;
    sidecar[_own].rights = 0;
#ifdef SAME_NAME
    stale = 0     /* the numbers of its calls begin with 1 again */
#else
    sidecar[_own].named = 0;
    sidecar[_own].name = 0
#endif
}

inline answered(_own) {
    sidecar[_own].leased = 1;
#ifdef COUNTS_FROM_ANSWER
    sidecar[_own].lease = HOLDS;
#else
    sidecar[_own].lease = sidecar[_own].next;
#endif
    sidecar[_own].rights = sidecar[_own].granted;
    told = DEATH && (told || _own == 0);
    call_end(_own)
}

/* ---- who takes part ---- */

#define LIVES(_s) (!((_s) == 1 && dead))
#define IS_OVER_HERE(_s) (sidecar[_s].leased && !sidecar[_s].lease)

proctype Caller(byte own) {
    byte keep, want;
    do
    :: atomic { LIVES(own) && sidecar[own].state == IDLE && !(sidecar[own].leased && !sidecar[own].lease) ->
            d_step { name_find(own) };
            if
            :: sidecar[own].named ->
                select(keep : 0 .. sidecar[own].rights);
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
    :: d_step { LIVES(own) && sidecar[own].state == ANSWERED -> answered(own); check() }
    :: d_step { LIVES(own) && (sidecar[own].state == REFUSED || IS_OVER_HERE(own)) -> lose(own); check() }
    od
}

proctype Server(byte own) {
    do
    :: d_step { sidecar[own].state == SENT -> execute(own); check() }
    od
}

#if !DEATH
/* The way to the authority and back. */
proctype Network(byte own) {
    do
    :: d_step { sidecar[own].state != IDLE -> call_end(own); check() }      /* the call, or its answer, is lost */
#if LATE
    :: d_step { sidecar[own].state == SENT && !late -> give_up(own); call_end(own); check() }
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
            for (i : 0 .. SIDECARS - 1) {
                sidecar[i].lease = sidecar[i].lease - (sidecar[i].lease > 0);
                sidecar[i].next = sidecar[i].next - (sidecar[i].next > 0)
            }
            for (i : 0 .. NAMES - 1) {
                book[i].lease = book[i].lease - (book[i].lease > 0)
            }
            learns = learns - (learns > 0);
            told = 0;
            check()
       }
    od
}

inline fail_over() {
    for (i : 0 .. NAMES - 1) {
        book[i].lease = 0
    }
    for (i : 0 .. SIDECARS - 1) {
        if
        :: sidecar[i].state == SENT -> call_end(i)
        :: else
        fi
    }
    old_clear();
    learns = 0;
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
    d_step { sidecar[1].named -> dead = 1 }
}
#endif

init {
    atomic {
        for (i : 0 .. SIDECARS - 1) {
            sidecar[i].name = i;
            sidecar[i].named = 1;
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

/* What a dead sidecar had comes back. */
ltl comes_back {
    [] (dead -> <> !book[sidecar[1].name].known)
}
