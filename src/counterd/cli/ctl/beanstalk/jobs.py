"""Lists the jobs of a tube, follows new jobs, and gets the figures of many tubes.

Floor 5 (ARCHITECTURE.md). Each of these functions needs several requests of the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.errors import ProtocolError, ServerError
from counterd.protocols.beanstalk.errors import Refused
from counterd.protocols.beanstalk.wire import BATCH_MAX, ID_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from counterd.client.beanstalk import Client

Figures = dict[str, str]
# The number of tubes in one pipeline.
AT_ONCE = 100


def tubes_of(client: Client, names: Sequence[bytes]) -> Iterator[Figures | None]:
    """Yields the statistics of these tubes. Yields None for a tube that does not exist."""
    command = "inspect_tube"
    for at in range(0, len(names), AT_ONCE):
        asked = names[at : at + AT_ONCE]
        found = _told(client, command, asked)
        if isinstance(found[0], Refused):  # beanstalkd does not know this command
            command = "stats_tube"
            found = _told(client, command, asked)
        for each in found:
            if isinstance(each, ServerError):
                raise each
            yield each


def _told(client: Client, command: str, names: Sequence[bytes]) -> list[Figures | ServerError | None]:
    pipeline = client.pipeline()
    for name in names:
        getattr(pipeline, command)(name)
    return pipeline.execute()


def jobs_of(client: Client, tube: bytes, state: str = "all", first: int = 0, needle: bytes = b"") -> Iterator[Figures]:
    """Yields the jobs of a tube whose ids are at least this id.

    A job that exists during the whole call is yielded exactly once.
    """
    # A page may lack jobs that ended while it was made, so a short page may not be the last one.
    while page := client.list_jobs(tube, state, first, BATCH_MAX, search=needle):
        yield from page
        if (first := id_of(page[-1]) + 1) > ID_MAX:
            return


def newest_of(client: Client, tube: bytes) -> int:
    """Returns the highest id of the jobs in a tube, or 0 if the tube has no job.

    Uses bisection, because a page of the list begins with the lowest ids.
    """
    low, high = 0, ID_MAX
    while low < high:
        middle = low + (high - low + 1) // 2
        page = client.list_jobs(tube, "all", middle, BATCH_MAX)
        low, high = (id_of(page[-1]), high) if page else (low, middle - 1)
    return low


class Tail:
    """The jobs that are put into a tube after the beginning."""

    def __init__(self, client: Client, tube: bytes) -> None:
        self._client = client
        self._tube = tube
        # A page may lack a job that was put while the page was made, although it has jobs that were put later. But it
        # has all jobs that existed at its beginning. So after a page, all jobs up to the newest id that was known
        # before it are settled: they are known, and are not requested again.
        self._newest = self._settled = newest_of(client, tube)
        self._known: set[int] = set()  # ids above _settled

    def look(self) -> list[Figures]:
        """Returns the jobs that were put since the previous call and still exist."""
        jobs = jobs_of(self._client, self._tube, first=self._settled + 1)
        new = [job for job in jobs if id_of(job) not in self._known]
        self._known |= {id_of(job) for job in new}
        self._settled, self._newest = self._newest, max(self._known, default=self._newest)
        self._known = {number for number in self._known if number > self._settled}
        return new


def id_of(job: Figures) -> int:
    """Returns the id of a job. Raises ProtocolError if the id is not a number."""
    if not job["id"].isdecimal():
        raise ProtocolError(f"a job whose id is {job['id']!r}")
    return int(job["id"])
