/*
 * Daemons that wait for rights to one counter, and the authority that shares them out (src/counterd/cluster/, and
 * src/counterd/protocols/counter/_shares.pxd), for spin.
 *
 * Requests have different maximums. A call or its answer may be lost. No time passes: leases.pml is about that.
 * README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: IGNORES_PLENTY, KEEPS_EXACT, GRANTS_ON,
 * EXCEEDS, UNAWARE, NO_LINE, HOARDS, GOES_ON, TURNS_PLENTY.
 */

#ifndef DAEMONS
#define DAEMONS 2
#endif
#ifndef MAXIMUM
#define MAXIMUM 2
#endif
#ifndef LEAST_MAXIMUM
#define LEAST_MAXIMUM 1     /* of a request; each is for one permit */
#endif
#ifndef LOSSES
#define LOSSES 1            /* whether calls and answers are lost */
#endif

mtype = { IDLE, SENT, ANSWERED };       /* what the call of a daemon is */

typedef Daemon {
    byte rights;            /* from which the store grants */
    byte used;
    byte limit;             /* the least maximum of a request that it grants from them */
    byte lease;             /* rights, as the policy knows them */
    byte maximum;           /* of these */
    bit yields;             /* others wait, or the rights are for one request: what becomes free goes back */
    byte waits;             /* maximum of the request that waits here; 0: none */
    mtype state = IDLE;
    byte least;             /* the call */
    byte want;
    byte keep;
    byte asked;             /* its maximum */
    bit exact;              /* it is for one request */
    byte granted;           /* the answer */
    bit is_exact;
    bit others_wait
}

typedef Entry {             /* of a daemon, in the books of the authority */
    byte rights;
    bit plenty;
    byte need;              /* rights that it waits for; 0: it does not wait */
    byte need_maximum
}

Daemon daemon[DAEMONS];
Entry book[DAEMONS];
byte line[DAEMONS];        /* daemons that wait, the first first */
byte waiting;
byte plenty_maximum;

hidden byte i, j, first;
hidden short sum, others, others_plenty, stands, limit, room, most, want;
hidden byte is_first, is_plenty;

#define LESSER(_a, _b) ((_a) < (_b) -> (_a) : (_b))
#define GREATER(_a, _b) ((_a) > (_b) -> (_a) : (_b))

/* ---- claims ---- */

inline check() {
    sum = 0; others = 0;
    for (i : 0 .. DAEMONS - 1) {
        assert(daemon[i].used <= daemon[i].rights && daemon[i].rights <= book[i].rights);
        sum = sum + book[i].rights;
        others = others + (book[i].need > 0)
    }
    assert(sum <= MAXIMUM);
    assert(others == waiting);      /* each that waits has one place */
    i = 0; j = 0; first = 0; sum = 0; others = 0; others_plenty = 0; stands = 0; limit = 0; room = 0; most = 0;
    want = 0; is_first = 0; is_plenty = 0
}

/* A request with this maximum is granted. Those that the authority has granted, and that have no answer yet, count. */
inline check_grant(_maximum) {
    sum = 0;
    for (i : 0 .. DAEMONS - 1) {
        sum = sum + daemon[i].used + (daemon[i].state == ANSWERED && daemon[i].waits &&
            daemon[i].granted >= daemon[i].least)
    }
    assert(sum <= _maximum)
}

/* ---- the authority: as the functions of these names ---- */

inline line_leave(_own) {
    j = 0;
    for (i : 0 .. DAEMONS - 1) {
        if
        :: i < waiting && line[i] != _own -> line[j] = line[i]; j++
        :: else
        fi
    }
    waiting = j;
    for (i : 0 .. DAEMONS - 1) {
        line[i] = (i < waiting -> line[i] : 0)
    }
    book[_own].need = 0;
    book[_own].need_maximum = 0
}

#ifdef NO_LINE
#define IS_FIRST(_own) 1
#else
#define IS_FIRST(_own) (waiting == 0 || line[0] == _own)
#endif

/* Returns in most: what the daemon has from now on; in is_plenty: its mode. */
inline decide(_own) {
    others = 0; others_plenty = 0;
    for (i : 0 .. DAEMONS - 1) {
        others = others + (i != _own -> book[i].rights : 0);
        others_plenty = others_plenty + (i != _own && book[i].plenty -> book[i].rights : 0)
    }
    first = line[0];
    is_first = IS_FIRST(_own);
    stands = (is_first -> book[_own].rights : LESSER(book[_own].rights, daemon[_own].keep));
    limit = daemon[_own].asked;
    is_plenty = !daemon[_own].exact;
    if
#ifndef IGNORES_PLENTY
    :: others_plenty && plenty_maximum != daemon[_own].asked -> limit = LESSER(limit, plenty_maximum); is_plenty = 0
#endif
    :: else
    fi;
    want = (is_plenty && is_first -> daemon[_own].want : GREATER(daemon[_own].least, daemon[_own].keep));
    room = limit - others;
    if
    :: !is_first ->
        room = LESSER(room, book[first].need_maximum - others);
        room = room - GREATER(book[first].need - book[first].rights, 0);
#ifndef TURNS_PLENTY
        is_plenty = is_plenty && (book[_own].plenty || book[_own].rights <= room)
#endif
    :: else
    fi;
    most = GREATER(limit - others, daemon[_own].keep);
    room = GREATER(stands, room);
    room = LESSER(want, room);
    room = LESSER(room, most);
    if
    :: room < daemon[_own].least ->
        stands = LESSER(stands, daemon[_own].least);
        most = LESSER(stands, most);
        if
        :: book[_own].need == 0 -> line[waiting] = _own; waiting++
        :: else
        fi;
        book[_own].need = daemon[_own].least;
        book[_own].need_maximum = daemon[_own].asked
    :: else ->
        most = room;
        line_leave(_own)
    fi;
#ifndef EXCEEDS
    is_plenty = is_plenty && others + most <= limit;
#endif
    book[_own].rights = most;
    book[_own].plenty = (is_plenty && most);
    plenty_maximum = (is_plenty -> daemon[_own].asked : plenty_maximum);
    if
    :: others_plenty == 0 && !book[_own].plenty -> plenty_maximum = 0     /* it has no meaning then */
    :: else
    fi
}

inline tick(_own) {
    decide(_own);
    daemon[_own].granted = most;
    daemon[_own].is_exact = !is_plenty;
    daemon[_own].others_wait = (waiting > (book[_own].need > 0));
    daemon[_own].state = ANSWERED;
    daemon[_own].want = 0;
    daemon[_own].keep = 0;
    if
    :: daemon[_own].waits && most >= daemon[_own].least -> check_grant(daemon[_own].waits)
    :: else
    fi
}

/* ---- a daemon, and its store ---- */

inline call_end(_own) {
    daemon[_own].state = IDLE;
    daemon[_own].least = 0;
    daemon[_own].want = 0;
    daemon[_own].keep = 0;
    daemon[_own].asked = 0;
    daemon[_own].exact = 0;
    daemon[_own].granted = 0;
    daemon[_own].is_exact = 0;
    daemon[_own].others_wait = 0
}

/* It would like to have _more rights than it needs, unless others wait. */
inline call(_own, _more) {
    daemon[_own].least = daemon[_own].used + (daemon[_own].waits > 0);
    daemon[_own].asked = (daemon[_own].lease -> daemon[_own].maximum :
        (daemon[_own].waits -> daemon[_own].waits : MAXIMUM));
    daemon[_own].exact = (daemon[_own].waits && daemon[_own].waits != daemon[_own].asked);
    daemon[_own].asked = (daemon[_own].exact -> daemon[_own].waits : daemon[_own].asked);
    daemon[_own].want = daemon[_own].least + (daemon[_own].exact || daemon[_own].yields -> 0 : _more);
#ifdef HOARDS
    daemon[_own].want = GREATER(daemon[_own].want, daemon[_own].rights);
#endif
    daemon[_own].keep = (daemon[_own].exact -> daemon[_own].used : LESSER(daemon[_own].rights,
        (daemon[_own].waits -> daemon[_own].least : daemon[_own].want)));
#ifndef GRANTS_ON
    daemon[_own].rights = daemon[_own].keep;
#endif
#ifndef UNAWARE
    daemon[_own].yields = daemon[_own].yields || daemon[_own].exact;
#endif
    daemon[_own].state = SENT
}

/* What became free while others wait is theirs. */
inline share_restored(_own) {
    daemon[_own].rights = (daemon[_own].yields -> daemon[_own].used : daemon[_own].rights);
    daemon[_own].limit = (daemon[_own].rights -> daemon[_own].limit : 0)
}

inline apply(_own) {
    daemon[_own].rights = daemon[_own].granted;
    daemon[_own].limit = daemon[_own].asked;
    daemon[_own].maximum = (daemon[_own].exact -> daemon[_own].maximum : daemon[_own].asked);
    daemon[_own].lease = daemon[_own].granted;
    daemon[_own].maximum = (daemon[_own].lease -> daemon[_own].maximum : 0);
#ifdef GOES_ON
    daemon[_own].yields = daemon[_own].is_exact;
#elif defined(KEEPS_EXACT)
    daemon[_own].yields = daemon[_own].others_wait;
#else
    daemon[_own].yields = daemon[_own].others_wait || daemon[_own].is_exact;
#endif
    if
    :: daemon[_own].waits && daemon[_own].granted >= daemon[_own].least ->
        daemon[_own].waits = 0;
        daemon[_own].used++
    :: else
    fi;
#ifndef HOARDS
    share_restored(_own);
#endif
    call_end(_own)
}

/* The call, or its answer, is lost. */
inline lose_call(_own) {
    daemon[_own].lease = daemon[_own].rights;
    daemon[_own].maximum = (daemon[_own].lease -> daemon[_own].maximum : 0);
    call_end(_own)
}

inline acquire(_own, _maximum) {
    if
    :: daemon[_own].used < daemon[_own].rights && _maximum >= daemon[_own].limit ->
        daemon[_own].used++;
        check_grant(_maximum)
    :: else -> daemon[_own].waits = (daemon[_own].state == IDLE -> _maximum : 0)
    fi
}

/* ---- who takes part ---- */

/* A request that this daemon alone has no room for is not told. */
#define MAY_ACQUIRE(_s, _maximum) (!daemon[_s].waits && daemon[_s].used < (_maximum))

proctype Acquirer(byte own) {
    do
    :: d_step { MAY_ACQUIRE(own, MAXIMUM) -> acquire(own, MAXIMUM); check() }
#if LEAST_MAXIMUM < MAXIMUM
    :: d_step { MAY_ACQUIRE(own, LEAST_MAXIMUM) -> acquire(own, LEAST_MAXIMUM); check() }
#endif
    od
}

proctype Releaser(byte own) {
    do
#if LOSSES
    :: d_step { daemon[own].waits && daemon[own].state == IDLE ->    /* it gives up */
            daemon[own].waits = 0;
            check()
       }
#endif
    :: d_step { daemon[own].used ->
            daemon[own].used--;
#ifndef HOARDS
            share_restored(own);
#endif
            check()
       }
    od
}

proctype Caller(byte own) {
    do
    :: d_step { daemon[own].state == IDLE -> call(own, 0); check() }
    :: d_step { daemon[own].state == IDLE && daemon[own].used + (daemon[own].waits > 0) < MAXIMUM ->
            call(own, 1); check() }
    :: d_step { daemon[own].state == ANSWERED -> apply(own); check() }
    od
}

proctype Authority(byte own) {
    do
    :: d_step { daemon[own].state == SENT -> tick(own); check() }
    od
}

#if LOSSES
proctype Network(byte own) {
    do
    :: d_step { daemon[own].state != IDLE -> lose_call(own); check() }
    od
}
#endif

init {
    atomic {
        for (i : 0 .. DAEMONS - 1) {
            run Acquirer(i);
            run Releaser(i);
            run Caller(i);
            run Authority(i);
#if LOSSES
            run Network(i);
#endif
        }
        i = 0
    }
}

/* Nobody waits for ever, if everybody gives back what it has at last. */
ltl is_served {
    [] (daemon[0].waits -> <> !daemon[0].waits)
}
