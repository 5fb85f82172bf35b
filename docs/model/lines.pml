/*
 * Sidecars that wait for rights to one counter, and the authority that shares them out (src/counterd/cluster/, and
 * src/counterd/protocols/counter/_shares.pxd), for spin.
 *
 * Requests have different maximums. A call or its answer may be lost. No time passes: leases.pml is about that.
 * README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: IGNORES_PLENTY, KEEPS_EXACT, GRANTS_ON,
 * EXCEEDS, UNAWARE, NO_LINE, HOARDS, GOES_ON, TURNS_PLENTY.
 */

#ifndef SIDECARS
#define SIDECARS 2
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

mtype = { IDLE, SENT, ANSWERED };       /* what the call of a sidecar is */

typedef Sidecar {
    byte rights;            /* from which the store grants */
    byte used;
    byte limit;             /* the least maximum of a request that it grants from them */
    byte block;             /* rights, as the policy knows them */
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

typedef Entry {             /* of a sidecar, in the books of the authority */
    byte rights;
    bit plenty;
    byte need;              /* rights that it waits for; 0: it does not wait */
    byte need_maximum
}

Sidecar sidecar[SIDECARS];
Entry book[SIDECARS];
byte line[SIDECARS];        /* sidecars that wait, the first first */
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
    for (i : 0 .. SIDECARS - 1) {
        assert(sidecar[i].used <= sidecar[i].rights && sidecar[i].rights <= book[i].rights);
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
    for (i : 0 .. SIDECARS - 1) {
        sum = sum + sidecar[i].used + (sidecar[i].state == ANSWERED && sidecar[i].waits &&
            sidecar[i].granted >= sidecar[i].least)
    }
    assert(sum <= _maximum)
}

/* ---- the authority: as the functions of these names ---- */

inline line_leave(_own) {
    j = 0;
    for (i : 0 .. SIDECARS - 1) {
        if
        :: i < waiting && line[i] != _own -> line[j] = line[i]; j++
        :: else
        fi
    }
    waiting = j;
    for (i : 0 .. SIDECARS - 1) {
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

/* Returns in most: what the sidecar has from now on; in is_plenty: its mode. */
inline decide(_own) {
    others = 0; others_plenty = 0;
    for (i : 0 .. SIDECARS - 1) {
        others = others + (i != _own -> book[i].rights : 0);
        others_plenty = others_plenty + (i != _own && book[i].plenty -> book[i].rights : 0)
    }
    first = line[0];
    is_first = IS_FIRST(_own);
    stands = (is_first -> book[_own].rights : LESSER(book[_own].rights, sidecar[_own].keep));
    limit = sidecar[_own].asked;
    is_plenty = !sidecar[_own].exact;
    if
#ifndef IGNORES_PLENTY
    :: others_plenty && plenty_maximum != sidecar[_own].asked -> limit = LESSER(limit, plenty_maximum); is_plenty = 0
#endif
    :: else
    fi;
    want = (is_plenty && is_first -> sidecar[_own].want : GREATER(sidecar[_own].least, sidecar[_own].keep));
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
    most = GREATER(limit - others, sidecar[_own].keep);
    room = GREATER(stands, room);
    room = LESSER(want, room);
    room = LESSER(room, most);
    if
    :: room < sidecar[_own].least ->
        stands = LESSER(stands, sidecar[_own].least);
        most = LESSER(stands, most);
        if
        :: book[_own].need == 0 -> line[waiting] = _own; waiting++
        :: else
        fi;
        book[_own].need = sidecar[_own].least;
        book[_own].need_maximum = sidecar[_own].asked
    :: else ->
        most = room;
        line_leave(_own)
    fi;
#ifndef EXCEEDS
    is_plenty = is_plenty && others + most <= limit;
#endif
    book[_own].rights = most;
    book[_own].plenty = (is_plenty && most);
    plenty_maximum = (is_plenty -> sidecar[_own].asked : plenty_maximum);
    if
    :: others_plenty == 0 && !book[_own].plenty -> plenty_maximum = 0     /* it has no meaning then */
    :: else
    fi
}

inline tick(_own) {
    decide(_own);
    sidecar[_own].granted = most;
    sidecar[_own].is_exact = !is_plenty;
    sidecar[_own].others_wait = (waiting > (book[_own].need > 0));
    sidecar[_own].state = ANSWERED;
    sidecar[_own].want = 0;
    sidecar[_own].keep = 0;
    if
    :: sidecar[_own].waits && most >= sidecar[_own].least -> check_grant(sidecar[_own].waits)
    :: else
    fi
}

/* ---- a sidecar, and its store ---- */

inline call_end(_own) {
    sidecar[_own].state = IDLE;
    sidecar[_own].least = 0;
    sidecar[_own].want = 0;
    sidecar[_own].keep = 0;
    sidecar[_own].asked = 0;
    sidecar[_own].exact = 0;
    sidecar[_own].granted = 0;
    sidecar[_own].is_exact = 0;
    sidecar[_own].others_wait = 0
}

/* It would like to have _more rights than it needs, unless others wait. */
inline call(_own, _more) {
    sidecar[_own].least = sidecar[_own].used + (sidecar[_own].waits > 0);
    sidecar[_own].asked = (sidecar[_own].block -> sidecar[_own].maximum :
        (sidecar[_own].waits -> sidecar[_own].waits : MAXIMUM));
    sidecar[_own].exact = (sidecar[_own].waits && sidecar[_own].waits != sidecar[_own].asked);
    sidecar[_own].asked = (sidecar[_own].exact -> sidecar[_own].waits : sidecar[_own].asked);
    sidecar[_own].want = sidecar[_own].least + (sidecar[_own].exact || sidecar[_own].yields -> 0 : _more);
#ifdef HOARDS
    sidecar[_own].want = GREATER(sidecar[_own].want, sidecar[_own].rights);
#endif
    sidecar[_own].keep = (sidecar[_own].exact -> sidecar[_own].used : LESSER(sidecar[_own].rights,
        (sidecar[_own].waits -> sidecar[_own].least : sidecar[_own].want)));
#ifndef GRANTS_ON
    sidecar[_own].rights = sidecar[_own].keep;
#endif
#ifndef UNAWARE
    sidecar[_own].yields = sidecar[_own].yields || sidecar[_own].exact;
#endif
    sidecar[_own].state = SENT
}

/* What became free while others wait is theirs. */
inline share_restored(_own) {
    sidecar[_own].rights = (sidecar[_own].yields -> sidecar[_own].used : sidecar[_own].rights);
    sidecar[_own].limit = (sidecar[_own].rights -> sidecar[_own].limit : 0)
}

inline settle(_own) {
    sidecar[_own].rights = sidecar[_own].granted;
    sidecar[_own].limit = sidecar[_own].asked;
    sidecar[_own].maximum = (sidecar[_own].exact -> sidecar[_own].maximum : sidecar[_own].asked);
    sidecar[_own].block = sidecar[_own].granted;
    sidecar[_own].maximum = (sidecar[_own].block -> sidecar[_own].maximum : 0);
#ifdef GOES_ON
    sidecar[_own].yields = sidecar[_own].is_exact;
#elif defined(KEEPS_EXACT)
    sidecar[_own].yields = sidecar[_own].others_wait;
#else
    sidecar[_own].yields = sidecar[_own].others_wait || sidecar[_own].is_exact;
#endif
    if
    :: sidecar[_own].waits && sidecar[_own].granted >= sidecar[_own].least ->
        sidecar[_own].waits = 0;
        sidecar[_own].used++
    :: else
    fi;
#ifndef HOARDS
    share_restored(_own);
#endif
    call_end(_own)
}

/* The call, or its answer, is lost. */
inline lose_call(_own) {
    sidecar[_own].block = sidecar[_own].rights;
    sidecar[_own].maximum = (sidecar[_own].block -> sidecar[_own].maximum : 0);
    call_end(_own)
}

inline acquire(_own, _maximum) {
    if
    :: sidecar[_own].used < sidecar[_own].rights && _maximum >= sidecar[_own].limit ->
        sidecar[_own].used++;
        check_grant(_maximum)
    :: else -> sidecar[_own].waits = (sidecar[_own].state == IDLE -> _maximum : 0)
    fi
}

/* ---- who takes part ---- */

/* A request that this sidecar alone has no room for is not told. */
#define MAY_ACQUIRE(_s, _maximum) (!sidecar[_s].waits && sidecar[_s].used < (_maximum))

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
    :: d_step { sidecar[own].waits && sidecar[own].state == IDLE ->    /* it gives up */
            sidecar[own].waits = 0;
            check()
       }
#endif
    :: d_step { sidecar[own].used ->
            sidecar[own].used--;
#ifndef HOARDS
            share_restored(own);
#endif
            check()
       }
    od
}

proctype Caller(byte own) {
    do
    :: d_step { sidecar[own].state == IDLE -> call(own, 0); check() }
    :: d_step { sidecar[own].state == IDLE && sidecar[own].used + (sidecar[own].waits > 0) < MAXIMUM ->
            call(own, 1); check() }
    :: d_step { sidecar[own].state == ANSWERED -> settle(own); check() }
    od
}

proctype Authority(byte own) {
    do
    :: d_step { sidecar[own].state == SENT -> tick(own); check() }
    od
}

#if LOSSES
proctype Network(byte own) {
    do
    :: d_step { sidecar[own].state != IDLE -> lose_call(own); check() }
    od
}
#endif

init {
    atomic {
        for (i : 0 .. SIDECARS - 1) {
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
    [] (sidecar[0].waits -> <> !sidecar[0].waits)
}
