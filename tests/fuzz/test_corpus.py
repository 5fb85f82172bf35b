"""Every input of the corpus, the inputs that fuzzing found worth keeping, keeps its target's invariant."""

from __future__ import annotations

import importlib

import pytest

from fuzz.run import TARGETS, inputs


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_of_the_corpus_breaks_anything(target: str) -> None:
    one_input = importlib.import_module(f"fuzz.{target}").one_input
    corpus = inputs(target)
    assert corpus
    for data in corpus:
        try:
            one_input(data)
        except Exception as error:
            raise AssertionError(f"{target}, {data.hex()}") from error
