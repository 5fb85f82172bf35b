"""What the beanstalk protocol costs at its edges, and beanstalkd with the same: memory of a job that waits.

Each function takes a server that runs and gives {figure: number}, its unit last in the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.bench.plan import Plan, read_work
from counterd.bench.run import run

if TYPE_CHECKING:
    from peers.servers import Server

DEPTH = 16


def memory(server: Server, count: int) -> dict[str, float]:
    """Measures the memory of a ready job with a body of 100 bytes."""
    before = server.resident()
    work = read_work("put")
    plan = Plan(protocol=server.protocol, port=server.port, work=work, depth=DEPTH, requests=count, duration=None)
    result = run(plan)
    if result.errors or result.requests != count:
        raise RuntimeError(f"{server.name}: {result.requests} of {count} jobs: {result.errors} {result.evidence}")
    return {"bytes each": (server.resident() - before) / count}
