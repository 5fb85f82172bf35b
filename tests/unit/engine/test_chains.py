"""Chains of blocks keep their bytes and free every block, whatever was written and freed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native import build, load

ChainsOf: Any = load("_chains", build("_chains", Path(__file__).parent)).ChainsOf

PAYLOAD = 60  # bytes of a block
BLOCKS = 400


@pytest.mark.parametrize("size", [1, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD, 3 * PAYLOAD + 1])
@pytest.mark.parametrize("lead", [0, 1, PAYLOAD])
def test_a_chain_has_as_many_blocks_as_its_bytes_need(size: int, lead: int) -> None:
    chains = ChainsOf(BLOCKS)
    chain = chains.write(lead, bytes(size))
    assert BLOCKS - chains.left == -(-(lead + size) // PAYLOAD)
    chains.free(chain)
    assert chains.left == BLOCKS


def test_a_chain_of_the_lead_alone_has_a_block() -> None:
    chains = ChainsOf(BLOCKS)
    chain = chains.write(8, b"")
    assert (chains.left, chains.read(chain)) == (BLOCKS - 1, b"")


def test_chains_are_equal_if_their_bytes_are() -> None:
    chains = ChainsOf(BLOCKS)
    text = bytes(range(200))
    chain = chains.write(0, text)
    assert chains.equals(chain, text)
    assert not any(chains.equals(chain, text[:at] + b"\xff" + text[at + 1 :]) for at in range(200))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, PAYLOAD), st.binary(max_size=3 * PAYLOAD)), min_size=1, max_size=60
    )
)
def test_chains_keep_their_bytes_while_others_change(steps: list[tuple[int, int, bytes]]) -> None:
    chains = ChainsOf(BLOCKS)
    kept: dict[tuple[int, int, int, int], bytes] = {}
    for what, lead, data in steps:
        if what == 0 and kept:
            chain = next(iter(kept))
            chains.free(chain)
            del kept[chain]
        elif what == 1 and kept:
            chain = next(reversed(kept))
            kept[chain] = (data + bytes(chain[3]))[: chain[3]]
            chains.replace(chain, kept[chain])
        elif lead + len(data) and chains.left >= 5:
            kept[chains.write(lead, data)] = data
        assert all(chains.read(chain) == text for chain, text in kept.items())
    for chain in kept:
        chains.free(chain)
    assert chains.left == BLOCKS
