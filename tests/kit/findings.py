"""What hypothesis has found, written down before it looks for a smaller example, which may take long or be interrupted.

Each run has a seed of its own, which is printed. It is the seed of every test of hypothesis in it.
"""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis.core import encode_failure
from hypothesis.internal.conjecture import engine
from hypothesis.internal.conjecture.data import ConjectureData

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SHRINKING_S = 60  # in place of 300: less than the limit of a test (overdue.py)
FRAMES = 3  # of a finding's trace that are shown


def finding_of(folder: Path, process: str) -> Path:
    """Returns the file for what a process of xdist has found."""
    return folder / f"{process}.found"


def install(path: Path) -> None:
    """Lets hypothesis write each first failure of a test to a file, and shrink for a shorter time."""
    engine.MAX_SHRINKING_SECONDS = SHRINKING_S
    mark_interesting = ConjectureData.mark_interesting
    known = set()

    def noted(data: ConjectureData, origin: Any) -> Any:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if (test, origin) not in known:
            known.add((test, origin))
            with path.open("a") as file:
                file.write(f"{test}: hypothesis has found, and now looks for a smaller example of:\n")
                file.write(traceback.format_exc(limit=-FRAMES))
                blob = encode_failure(data.choices)
                file.write(f"    to repeat it: @reproduce_failure({hypothesis.__version__!r}, {blob!r})\n\n")
        return mark_interesting(data, origin)

    ConjectureData.mark_interesting = noted  # type: ignore[method-assign]


def function_of(item: pytest.Item) -> Any:
    """Returns the function of a test of hypothesis, or None."""
    function = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
    return function if hasattr(function, "is_hypothesis_test") else None


def sow(item: pytest.Item, seed: int) -> None:
    """Gives a test of hypothesis the seed of the run. hypothesis.seed() would forget earlier failures too."""
    function = function_of(item)
    if function and not hypothesis.settings.default.derandomize:
        getattr(function, "_hypothesis_state_machine_class", function)._hypothesis_internal_use_seed = seed
