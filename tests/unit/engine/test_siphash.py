"""SipHash-1-3 against published vectors, and against the one that CPython hashes bytes with."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from counterd._core import siphash

KEY = bytes(range(16))

# Of the reference implementation: key 00 01 .. 0f, input 00 01 .. of as many bytes as the place in this list.
PUBLISHED = """
    abac0158050fc4dc c9f49bf37d57ca93 82cb9b024dc7d44d 8bf80ab8e7ddf7fb cf75576088d38328 def9d52f49533b67
    c50d2b50c59f22a7 d3927d989bb11140 369095118d299a8e 25a48eb36c063de4 79de85ee92ff097f 70c118c1f94dc352
    78a384b157b4d9a2 306f760c1229ffa7 605aa111c0f95d34 d320d86d2a519956 cc4fdd1a7d908b66 9cf2689063dbd80c
    8ffc389cb473e63e f21f9de58d297d1c c0dc2f46a6cce040 b992abfe2b45f844 7ffe7b9ba320872e 525a0e7fdae6c123
    f464aeb267349c8c 45cd5928705b0979 3a3e35e3ca9913a5 a91dc74e4ade3b35 fb0bed02ef6cd00d
"""
VECTORS = PUBLISHED.split()


@pytest.mark.parametrize("size", range(len(VECTORS)))
def test_published_vector(size: int) -> None:
    assert f"{siphash(KEY, bytes(range(size))):016x}" == VECTORS[size]


HASH_HEX_STRINGS = """
import json, sys
print(json.dumps([sys.hash_info.algorithm, [hash(bytes.fromhex(line)) for line in json.load(sys.stdin)]]))
"""


def test_agrees_with_the_hash_of_cpython() -> None:
    """An independent implementation, whose key PYTHONHASHSEED=0 sets to zeros."""
    numbers = random.Random(13)
    inputs = [numbers.randbytes(size) for size in (*range(1, 130), 255, 256, 257, 1000, 4096, 65535)]
    done = subprocess.run(
        [sys.executable, "-c", HASH_HEX_STRINGS],
        input=json.dumps([data.hex() for data in inputs]),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    algorithm, theirs = json.loads(done.stdout)
    if algorithm != "siphash13":
        pytest.skip(f"this Python hashes with {algorithm}; those from 3.11 on use siphash13")
    for data, their in zip(inputs, theirs, strict=True):
        signed = int.from_bytes(siphash(bytes(16), data).to_bytes(8, "big"), "big", signed=True)
        assert (-2 if signed == -1 else signed) == their


def test_every_bit_of_the_key_counts() -> None:
    keys = {bytes(16)} | {(1 << bit).to_bytes(16, "little") for bit in range(128)}
    assert len({siphash(key, b"name") for key in keys}) == 129


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"^the key must have 16 bytes, not {size}$"):
        siphash(bytes(size), b"")


@pytest.mark.parametrize("arguments", [(None, b""), (KEY, None), ("0123456789abcdef", b""), (KEY, bytearray())])
def test_only_bytes_are_hashed(arguments: tuple[object, object]) -> None:
    with pytest.raises(TypeError):
        siphash(*arguments)  # type: ignore[arg-type]
