"""What the world of Takes knows that each request has to be answered, by what is in its books.

Written from docs/protocols/counter.md. Where either of two replies is right, the one that was given decides.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from simulation.shares import Item, Limited
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.asking import Request
    from simulation.shares import Books, Party

GET, ACQUIRE, RELEASE = 0x01, 0x02, 0x03
TAKE, CANCEL, SETTLE, RESUME, GOODBYE, WHO, HELD = range(0x20, 0x27)
OK, NOT_FOUND, INVALID, NOT_AVAILABLE, NOT_ACQUIRED, CANCELLED, FULL = 0, 0x01, 0x04, 0x21, 0x22, 0x23, 0x82
TEXTS = {
    NOT_FOUND: b"Not found", INVALID: b"Invalid arguments", NOT_AVAILABLE: b"Resource not available",
    NOT_ACQUIRED: b"Not acquired", CANCELLED: b"Cancelled", FULL: b"OutOfMemory",
}  # fmt: skip
DRAINING, OVER = b"Draining", b"More than the limit of the server"
NO_TIME = 0xFFFFFFFF

_SHORT = struct.Struct(">BIII")  # the item that is short, what is left of it, its maximum, and when it will be there


def short_body(books: Books, limited: list[Limited], at: int, ms: int) -> bytes:
    return _SHORT.pack(at, books.left(limited[at]), limited[at].most, ms)


def short_text(body: bytes) -> bytes:
    return body[_SHORT.size :]


def decide(books: Books, party: Party, request: Request, status: int) -> tuple[int, bytes]:
    """What a request has to be answered. status: as it was; where either is right, it decides."""
    name, amount = request.name, request.amount
    held = party.held.get(name, 0)
    opcode, verdict, body = request.opcode, OK, b""
    if opcode == ACQUIRE:
        return decide_acquire(books, party, request, status)
    if opcode == RELEASE:
        if status == NOT_FOUND and not books.total(name):
            verdict = NOT_FOUND
        elif amount > held:
            verdict = NOT_ACQUIRED
        elif amount:
            books.release(party, name, amount)
    elif opcode == GET:
        verdict = OK if books.total(name) or status != NOT_FOUND else NOT_FOUND
        body = books.total(name).to_bytes(4, "big") if verdict == OK else b""
    elif opcode == HELD:
        body = held.to_bytes(4, "big")
    elif opcode == CANCEL:
        verdict = OK if request.is_done else NOT_FOUND
        if any(wait.opaque == request.take for wait in books.waits_of(party)):
            raise Violation("waits", f"{request} has ended no wait, and the Take waits")
    elif opcode == SETTLE:
        verdict = decide_settle(books, party, request, status)
    elif opcode == GOODBYE:
        if books.waits_of(party):
            raise Violation("replies", f"connection {party.number} has said goodbye, and waits on")
        books.give_back(party)
        party.token, party.former = b"", (b"", 0)
    return verdict, body or (TEXTS[verdict] if verdict else b"")


def decide_acquire(books: Books, party: Party, request: Request, status: int) -> tuple[int, bytes]:
    name = request.name
    item = Item(name, False, request.amount, request.maximum)
    limited = books.limited(item)
    if books.draining:
        return NOT_AVAILABLE, DRAINING
    if not limited.is_possible:
        return NOT_AVAILABLE, OVER + b": %d" % limited.most
    verdict = OK
    if status == FULL and (
        not books.has_holdings(party, [name]) or books.records_may_lack([(name, False)])
    ):  # fmt: skip
        verdict = FULL
    elif not books.is_there(limited) or books.is_awaited((name, False)):
        verdict = NOT_AVAILABLE
    elif not books.has_holdings(party, [name]):
        verdict = FULL
    else:
        books.grant(party, [limited], 0)
    return verdict, TEXTS[verdict] if verdict else request.amount.to_bytes(4, "big")


def decide_settle(books: Books, party: Party, request: Request, status: int) -> int:
    for charge in books.charges_of(party):
        if charge.grant == request.grant and charge.item.name == request.name:
            has_more = request.amount > charge.item.amount
            if status == FULL and has_more and books.records_may_lack([(request.name, True)]):
                return FULL
            books.settle(charge, request.amount)
            return OK
    return NOT_FOUND


def short_items(books: Books, items: tuple[Item, ...]) -> list[Limited]:
    """The items of which there is too little for a newcomer."""
    limited = [books.limited(item) for item in items]
    return [
        each for each in limited if not books.is_there(each) or books.is_awaited(each.item.thing)
    ]  # fmt: skip


def decide_take(
    books: Books, party: Party, request: Request, told: int | None, *, is_over: bool
) -> tuple[int | None, bytes, list[Limited]]:
    """The status of a Take, None if it has to wait, the body of a refusal, and its items as they are limited.

    told: as it was answered. is_over: the peer sends nothing more, so that it cannot wait.
    """
    limited = [books.limited(item) for item in request.items]
    impossible = why_impossible(books, limited)
    if impossible is not None:
        return (*impossible, limited)
    lacks = told == FULL and books.records_may_lack(each.item.thing for each in limited)
    books.see(request.items)  # whatever becomes of the Take
    short = [] if lacks else short_items(books, request.items)
    if short and request.wait_ms and not is_over and books.can_wait(party, request.items):
        return None, b"", limited
    if short and (is_over or not request.wait_ms):
        at = limited.index(short[0])
        ms = NO_TIME if books.is_there(short[0]) else books.retry_ms(short[0])
        return NOT_AVAILABLE, short_body(books, limited, at, ms) + TEXTS[NOT_AVAILABLE], limited
    charges = sum(each.item.on_death > 0 for each in limited)
    names = [each.item.name for each in limited if not each.item.is_rate]
    if lacks or short or not books.has_holdings(party, names) or not books.has_charges(charges):
        return FULL, TEXTS[FULL], limited
    return OK, b"", limited


def why_impossible(books: Books, limited: list[Limited], wanted: int = 0) -> tuple[int, bytes] | None:
    """How a Take is refused that cannot be granted whatever is given back, or None. wanted: the item it waited for."""
    if books.draining:
        return NOT_AVAILABLE, short_body(books, limited, wanted, NO_TIME) + DRAINING
    for at, each in enumerate(limited):
        if not each.is_known:
            return NOT_FOUND, b"No limit for the rate of item %d: send one, or add it to counter.limits" % at
        if not each.is_possible:
            return NOT_AVAILABLE, short_body(books, limited, at, NO_TIME) + OVER
    return None
