"""Each test belongs to one part of the suite, and the names in the table of the parts exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import parts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("test", "part"),
    [
        ("tests/property/test_cuts.py::test_any_stream", "engine"),
        ("tests/functional/test_drain.py::test_it[close]", "daemon"),
        ("tests/history/test_daemon_takes.py::test_daemon_has_an_order_for_takes[one key]", "proofs"),
        ("tests/functional/test_counterbench_takes.py::test_sizes_of_names[8]", "proofs"),
        ("tests/functional/test_counterbench_beanstalk.py::test_every_kind_of_request[counterd]", "daemon"),
        ("tests/history/test_takes.py::test_wrong_server_is_caught[LetsSleep]", "proofs"),
        ("tests/scenarios/test_restarted.py::test_it[counter acquire-uvloop]", "proofs"),
        ("tests/scenarios/test_restarted.py::test_it[counter acquire-asyncio]", "daemon"),
    ],
)
def test_a_part_is_found_by_name(test: str, part: str) -> None:
    assert parts.part_of(test) == part
    path = test.partition("::")[0]
    assert [name for name in parts.NAMES if parts.may_have(path, name)].count(part) == 1
    assert parts.may_have("tests", part)
    assert parts.may_have(path.rpartition("/")[0], part)


@pytest.mark.parametrize("name", [*parts.ENGINE, *parts.PROOFS, *parts.SMOKES])
def test_names_in_the_table_exist(name: str) -> None:
    file, _, function = name.partition("::")
    found = list(ROOT.glob(f"{file.rstrip('/')}*"))
    assert found
    if function:
        assert f"def {function.partition('[')[0]}" in found[0].read_text("utf-8")


@pytest.mark.parametrize("reason", parts.PROOFS.values())
def test_replacement_tests_exist(reason: str) -> None:
    for word in reason.replace(",", " ").replace(";", " ").replace(":", " ").split():
        if word.endswith(".py"):
            assert (ROOT / word).exists() or list(ROOT.glob(f"tests/**/{word}")), word
        elif word.startswith("tests/"):
            assert (ROOT / word).exists(), word
        elif word.startswith("test_"):
            assert any(f"def {word}(" in path.read_text("utf-8") for path in ROOT.glob("tests/**/test_*.py")), word
