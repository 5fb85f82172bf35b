"""Shows the progress of a run on a terminal.

Floor 5 (ARCHITECTURE.md). The parent's own loop redraws the panel, because load processes must not be forked while
another thread runs.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from counterd.bench.run import Progress

REDRAW_S = 0.25  # the load process may share its core with this
BAR_WIDTH = 60


@contextlib.contextmanager
def panel(console: Console | None) -> Iterator[Callable[[str], Callable[[Progress], None] | None]]:
    """Yields a function that takes the label of a run and returns its watcher. Yields None if there is no console."""
    if console is None:
        yield lambda _: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def begin(label: str) -> Callable[[Progress], None]:
            drawn = 0.0

            def watch(progress: Progress) -> None:
                nonlocal drawn
                if time.monotonic() - drawn >= REDRAW_S:
                    live.update(draw(label, progress), refresh=True)
                    drawn = time.monotonic()

            return watch

        yield begin


def draw(label: str, progress: Progress) -> RenderableType:
    """Draws the state of a run."""
    bar = Table.grid()  # unlike a Group, this ends the line of the bar
    bar.add_row(
        ProgressBar(completed=100 * (progress.fraction or 0.0), width=BAR_WIDTH, pulse=progress.fraction is None)
    )
    lines: list[RenderableType] = [
        Text(f"{label}: {progress.stage}", style="bold"),
        bar,
        Text(f"{progress.connected:,} connections, {progress.requests:,} requests answered"),
    ]
    if progress.moment is not None:
        rate = progress.moment.requests / progress.moment.seconds
        shown = progress.moment.percentiles.items()
        latency = "".join(f"   {'p' * name.isdigit()}{name} {value / 1e6:.3f} ms" for name, value in shown)
        lines.append(Text(f"last second: {rate:,.0f}/s{latency}"))
    if progress.errors:
        text = ", ".join(f"{kind} {count:,}" for kind, count in progress.errors.items())
        lines.append(Text(f"errors: {text}", style="red"))
    return Group(*lines)
