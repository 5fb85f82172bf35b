/*
 * Connections of the counter protocol's engine that are resumed (protocols/counter/_resumptions.pxd, _session.pyx and
 * _store.pyx), for spin.
 *
 * One client has a token, loses its connection at any moment, and presents the token on another one. What it sent before
 * may arrive at any time after that, or never. Another client wants the same permit. Each call into the engine is one
 * indivisible step. README.md says what is modelled and what is not; tools/model.py runs it.
 *
 * With one of the defects #defined, a claim must fail: STEALS, FORGETS, SHARES, COPIES, DROPS, NEVER_OVER.
 */

#ifndef SOCKETS
#define SOCKETS 2       /* connections at once, those that the client has given up included */
#endif
#ifndef TRIES
#define TRIES 2         /* to go on with a connection */
#endif
#define NUMBERS (SOCKETS + 1)
#ifndef SECRETS
#define SECRETS 4       /* tokens; when they are made, it asks for none any more, and a RESUME is refused */
#endif
#define NOBODY 255

mtype = { FREE, OPEN, LOST };                                       /* a socket; LOST: its client does not read it any more */
mtype = { NOTHING, ASK, RESUME, ACQUIRE, RELEASE, GOODBYE };        /* on its way to the server, or not answered yet */
mtype = { SILENCE, DONE, REFUSED };                                 /* on its way to the client */

typedef Socket {
    mtype state = FREE;
    byte number;            /* of its connection */
    mtype message = NOTHING;
    byte token;             /* that a RESUME presents */
    byte attempt;
    mtype reply = SILENCE;
    byte made;              /* the token in it */
    bit told                /* whether the connection holds the permit, as a Held would tell */
}

typedef Number {
    bit used;
    bit held;
    bit kept;               /* its connection has ended, and what it holds stays */
    byte secret;            /* of its token; 0: none */
    byte former;            /* that was presented for it last */
    byte attempt
}

Socket socket[SOCKETS];
Number number[NUMBERS];
bit other;                  /* the other client has the permit */
byte made;                  /* tokens */

byte current = NOBODY;      /* the socket that the client uses */
byte token;                 /* that it knows; 0: none */
byte tries;                 /* how often it presented it */
mtype asked = NOTHING;      /* and has no answer to */
bit believed;               /* to have the permit */
bit fresh;                  /* has nothing to go on with on this connection, or has gone on with it */
bit dead;                   /* never connects again */

#if SOCKETS == 2
#define HELD (number[0].held + number[1].held + number[2].held)
#else
#define HELD (number[0].held + number[1].held + number[2].held + number[3].held)
#endif

hidden byte i, j, found, own, sum;

/* ---- claims ---- */

inline check() {
    sum = 0;
    for (i : 0 .. NUMBERS - 1) {
        sum = sum + number[i].held;
        assert(number[i].used || !(number[i].held || number[i].kept || number[i].secret));
    }
    for (i : 0 .. SOCKETS - 1) {
        assert(socket[i].state == FREE || (number[socket[i].number].used && !number[socket[i].number].kept))
    }
    assert(sum + other <= 1 && believed + other <= 1);      /* never two at once, and nobody believes so */
    if
    :: current != NOBODY && asked == NOTHING -> assert(number[socket[current].number].held == believed)
    :: else
    fi;
    i = 0; j = 0; sum = 0
}

/* ---- the engine: as the functions of these names ---- */

/* Returns in found: the number whose connection a token is of; NOBODY = none. */
inline token_find(_token, _attempt) {
    found = NOBODY;
    for (i : 0 .. NUMBERS - 1) {
        if
        :: _token && number[i].secret == _token -> found = i
#ifdef STEALS
        :: _token && number[i].secret && number[i].former == _token && number[i].secret != _token -> found = i
#elif !defined(FORGETS)
        :: _token && number[i].secret && number[i].former == _token && number[i].secret != _token &&
            _attempt > number[i].attempt -> found = i
#endif
        :: else
        fi
    }
}

inline token_issue(_number, _former, _attempt) {
    made++;
    number[_number].secret = made;
    number[_number].former = _former;
    number[_number].attempt = _attempt
}

inline number_free(_number) {
    number[_number].used = 0;
    number[_number].held = 0;
    number[_number].kept = 0;
    number[_number].secret = 0;
    number[_number].former = 0;
    number[_number].attempt = 0
}

/* A session gets the number of another connection; if that is open, it gets the session's. */
inline exchange(_socket, _number) {
    own = socket[_socket].number;
#ifdef COPIES
    number[own].held = number[_number].held;
#endif
    j = NOBODY;
    for (i : 0 .. SOCKETS - 1) {
        if
        :: i != _socket && socket[i].state != FREE && socket[i].number == _number -> j = i
        :: else
        fi
    }
    if
    :: j == NOBODY -> number_free(own)
#ifdef SHARES
    :: j != NOBODY -> number_free(own)      /* the old connection goes on under the same number */
#else
    :: j != NOBODY -> socket[j].number = own
#endif
    fi;
    number[_number].kept = 0;
    socket[_socket].number = _number;
    own = 0
}

inline resume_decide(_socket) {
    token_find(socket[_socket].token, socket[_socket].attempt);
    if
    :: found == NOBODY || made >= SECRETS -> socket[_socket].reply = REFUSED
    :: else ->
        exchange(_socket, found);
        token_issue(found, socket[_socket].token, socket[_socket].attempt);
        socket[_socket].reply = DONE;
        socket[_socket].made = number[found].secret;
        socket[_socket].told = number[found].held
    fi;
    found = 0
}

inline give_back(_number) {
    number[_number].secret = 0;
    number[_number].former = 0;
    number[_number].held = 0
}

inline silence(_socket) {
    socket[_socket].reply = SILENCE;
    socket[_socket].made = 0;
    socket[_socket].told = 0
}

inline execute(_socket) {
    own = socket[_socket].number;
    socket[_socket].reply = DONE;
    if
    :: socket[_socket].message == ASK ->
        token_issue(own, 0, 0);
        socket[_socket].made = number[own].secret
    :: socket[_socket].message == RESUME -> resume_decide(_socket)
    :: socket[_socket].message == ACQUIRE ->
        sum = other;
        for (i : 0 .. NUMBERS - 1) {
            sum = sum + number[i].held
        }
        if
        :: sum == 0 -> number[own].held = 1
        :: else -> socket[_socket].reply = REFUSED
        fi
    :: socket[_socket].message == RELEASE ->
        if
        :: number[own].held -> number[own].held = 0
        :: else -> socket[_socket].reply = REFUSED
        fi
    :: socket[_socket].message == GOODBYE -> give_back(own)
    fi;
    socket[_socket].message = NOTHING;
    socket[_socket].token = 0;
    socket[_socket].attempt = 0;
    own = 0; sum = 0;
    if
    :: socket[_socket].state == LOST -> silence(_socket)    /* nobody reads it */
    :: else
    fi
}

/* Session.closed, of a socket that its client has given up. */
inline forget(_socket) {
    own = socket[_socket].number;
    if
#ifndef DROPS
    :: number[own].held && number[own].secret -> number[own].kept = 1
    :: !(number[own].held && number[own].secret) -> number_free(own)
#else
    :: number_free(own)
#endif
    fi;
    socket[_socket].state = FREE;
    socket[_socket].number = 0;
    socket[_socket].message = NOTHING;
    socket[_socket].token = 0;
    socket[_socket].attempt = 0;
    own = 0
}

/* ---- the client ---- */

/* Takes a free socket and a free number, and presents the token that it knows. */
inline connect() {
    found = NOBODY;
    for (i : 0 .. SOCKETS - 1) {
        for (j : 0 .. NUMBERS - 1) {
            if
            :: found == NOBODY && socket[i].state == FREE && !number[j].used ->
                found = i;
                socket[i].state = OPEN;
                socket[i].number = j;
                number[j].used = 1
            :: else
            fi
        }
    }
    current = found;
    if
    :: found != NOBODY && token ->
        tries++;
        socket[found].message = RESUME;
        socket[found].token = token;
        socket[found].attempt = tries;
        asked = (asked == ACQUIRE || asked == RELEASE || asked == GOODBYE -> asked : RESUME)
    :: found != NOBODY && !token -> asked = NOTHING
    :: else
    fi;
    fresh = (token == 0);
    found = 0; i = 0; j = 0
}

/* A reply arrives. The first on a connection that presented a token says what it has; what was asked for before the last
 * connection was lost may have been done, or not. */
inline replied() {
    if
    :: fresh && socket[current].made -> token = socket[current].made; tries = 0
    :: fresh && !socket[current].made && asked == ACQUIRE -> believed = (socket[current].reply == DONE)
    :: fresh && !socket[current].made && asked == RELEASE -> assert(socket[current].reply == DONE)
    :: !fresh && socket[current].made ->
        assert(!believed || socket[current].told);      /* what should have stayed has stayed */
        believed = socket[current].told; token = socket[current].made; tries = 0
    :: !fresh && !socket[current].made ->
        assert(!believed || made >= SECRETS);
        believed = 0; token = 0; tries = 0
    :: else
    fi;
    fresh = 1;
    asked = NOTHING;
    silence(current)
}

proctype Client() {
    do
    :: d_step { current == NOBODY && !dead && made < SECRETS && tries < TRIES -> connect(); check() }
    :: d_step { current != NOBODY && asked == NOTHING && !token && made < SECRETS ->
            asked = ASK; socket[current].message = ASK; check() }
    :: d_step { current != NOBODY && asked == NOTHING && !believed ->
            asked = ACQUIRE; socket[current].message = ACQUIRE; check() }
    :: d_step { current != NOBODY && asked == NOTHING && believed ->
            asked = RELEASE; believed = 0; socket[current].message = RELEASE; check() }
    :: d_step { current != NOBODY && asked == NOTHING && token ->
            asked = GOODBYE; believed = 0; token = 0; tries = 0; socket[current].message = GOODBYE; check() }
    :: d_step { current != NOBODY && socket[current].reply != SILENCE ->
            replied();
            check()
       }
    :: d_step { current != NOBODY ->        /* it loses the connection */
            socket[current].state = LOST;
            silence(current);
            current = NOBODY;
            believed = (token -> believed : 0);
            check()
       }
    :: d_step { !dead && current == NOBODY ->       /* it dies, or gives up what it had */
            dead = 1; token = 0; tries = 0; asked = NOTHING; believed = 0; check() }
    od
}

proctype Other() {
    do
    :: d_step { !other && HELD == 0 -> other = 1; check() }
    :: d_step { other -> other = 0; check() }
    od
}

/* The server's end. What its client has given up is read, or not, before its end is noticed. */
proctype Server(byte own_socket) {
    do
    :: d_step { socket[own_socket].message != NOTHING -> execute(own_socket); check() }
    :: d_step { socket[own_socket].state == LOST -> forget(own_socket); check() }
    od
}

#ifndef NEVER_OVER
#define IS_PRESENTED(_number) (token && (number[_number].secret == token || number[_number].former == token))

/* A grace time is over. What the client will present is presented in time. */
proctype Timer(byte own_number) {
    do
    :: d_step { number[own_number].kept && !IS_PRESENTED(own_number) -> number_free(own_number); check() }
    od
}
#endif

init {
    atomic {
        run Client();
        run Other();
        for (i : 0 .. SOCKETS - 1) {
            run Server(i)
        }
#ifndef NEVER_OVER
        for (i : 0 .. NUMBERS - 1) {
            run Timer(i)
        }
#endif
        i = 0
    }
}

/* What a dead client had comes back. */
ltl comes_back {
    [] (dead -> <> (HELD == 0))
}
