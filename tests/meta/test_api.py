"""docs/api/client.md equals the docstrings, and everything that a user imports has one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.client import aio, throttr

if TYPE_CHECKING:
    from types import ModuleType

TOOL = Path(__file__).parents[2] / "tools" / "api.py"


@pytest.fixture(scope="module")
def api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(api: ModuleType) -> str:
    return api.page()


def test_the_page_is_generated_from_the_docstrings(api: ModuleType, page: str) -> None:
    assert api.PAGE.read_text("utf-8") == page, "`make docs` writes it anew"


def test_everything_public_has_a_docstring(api: ModuleType, page: str) -> None:
    modules = [importlib.import_module(name) for name in api.MODULES]
    assert all(value.__doc__ for module in modules for _, value in api.public(module))
    assert "```\n\n\n" not in page, "a signature without a docstring"


def test_everything_public_is_on_the_page_once(api: ModuleType, page: str) -> None:
    for name in api.MODULES:
        assert page.count(f"## {name}\n") == 1
        part = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        elsewhere = re.findall(r"\w+", part.partition("Also here, from")[2])
        for public, _ in api.public(importlib.import_module(name)):
            assert (f"\n### {public}\n" in part) != (public in elsewhere)
    assert page.count("\n#### Client.acquire\n") == 2, "of permits and of tokens, and not again with await"


def test_nothing_private_is_on_the_page(page: str) -> None:
    assert "floor" not in page.lower()
    for inside in ("ForwardRef", "<", "\n#### _", "wire.", "Asked"):
        assert inside not in page


def test_signatures_are_as_in_the_source(api: ModuleType) -> None:
    assert api.signature("close", aio.Client.close) == "async close() -> None"
    assert api.signature("list", throttr.Client.list) == "list() -> list[ListEntry]"
    assert api.declaration("Hold", aio.Hold) == "class Hold"
    assert api.declaration("Event", throttr.Event) == "class Event(channel: bytes, payload: bytes)"
    long = api.signature("hold", aio.Client.hold).splitlines()
    assert long[0] == "hold("
    assert long[3:5] == ["    *,", "    maximum: int,"]
    assert long[-2:] == [
        '    on_lost: Callable[[Hold], object] | Literal["raise", "reacquire"] = "raise",',
        ") -> Hold",
    ]


def test_descriptions_of_names_become_a_list(api: ModuleType) -> None:
    class Documented:
        """First line.

        Floor 9: nobody's business.

        Before:
        one, two: what they mean,
        which is long.
        three: less, and a sentence that goes on with some
        files: these.

        After: this.
        """

    wanted = (
        "First line.\n\nBefore:\n\n- one, two: what they mean,\n  which is long.\n"
        "- three: less, and a sentence that goes on with some\n  files: these.\n\nAfter: this.\n"
    )
    assert api.prose(Documented) == wanted
