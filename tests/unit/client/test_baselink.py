"""Whether a new connection may resume one that has ended."""

from __future__ import annotations

import time
from types import SimpleNamespace

from counterd.client._baselink import Link
from counterd.client._calls import Pending
from counterd.client._connection import CLOSED


def ended(grace_s: float | None, why: str = "the server closed it") -> Link:
    link = Link("there", 1.0, print, print, calls=Pending())
    link.token = None if grace_s is None else SimpleNamespace(grace_s=grace_s)
    assert not link.may_resume(), "it is open"
    link._mark_ended(why)
    return link


def test_a_connection_may_be_resumed_within_its_grace_time() -> None:
    assert ended(60).may_resume()
    assert not ended(None).may_resume(), "it has no token"
    assert not ended(60, CLOSED).may_resume(), "the program has closed it"
    late = ended(60)
    late._resumable_until = time.monotonic()
    assert not late.may_resume()


def test_a_connection_without_a_token_cannot_be_resumed() -> None:
    link = ended(60)
    link.token = None
    assert not link.may_resume()
