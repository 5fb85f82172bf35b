"""JSON documents: mistakes are reported with their place, whatever they are."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.json_documents import PROBLEMS_MAX, DocumentError, Members, Problems, read_document


def problems(text: bytes | str) -> tuple[str, ...]:
    with pytest.raises(DocumentError) as caught:
        read_document(text)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_json_is_read() -> None:
    assert read_document(b'\xef\xbb\xbf{"a": [1, 2.5, null, "\xc3\xa9"]}') == {"a": [1, 2.5, None, "é"]}
    assert read_document('{"a": {}}') == {"a": {}}


def test_duplicate_names_are_kept() -> None:
    found = read_document('{"b": 1, "a": 2, "b": 3, "a": 4, "c": {"d": 1, "d": 2}}')
    assert isinstance(found, Members)
    assert found.twice == ("a", "b")
    assert isinstance(found["c"], Members)
    assert found["c"].twice == ("d",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a":\n 1 2}', "line 2, column 4: "),
        (b"", "line 1, column 1: "),
        (b'{"a":\n "\xff"}', "line 2, byte 3: not UTF-8"),
        (b"[" * 100_000, "the document: nested too deeply"),
    ],
)
def test_mistakes_have_their_place(text: bytes, problem: str) -> None:
    (found,) = problems(text)
    assert found.startswith(problem)


def test_a_number_of_many_digits_is_read_quickly() -> None:
    assert read_document(b"1" * 100_000) == int("1" * 1000)


@given(st.binary())
def test_any_bytes_are_a_document_or_are_refused(text: bytes) -> None:
    with contextlib.suppress(DocumentError):
        read_document(text)


def test_the_number_of_problems_is_bounded() -> None:
    told = Problems()
    for number in range(PROBLEMS_MAX + 3):
        told.add(f"line {number}", "wrong")
    assert told.full
    assert list(told)[-2:] == [f"line {PROBLEMS_MAX - 1}: wrong", "the document: 3 more mistakes"]
