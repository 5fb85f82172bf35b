"""Files that settings name: which are read, and the errors for those that cannot be used."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from counterd.contract import Files
from counterd.control import files
from counterd.control.config.keys import settings_for
from counterd.control.config.loading import load
from counterd.control.files import FileError, problems_of, read_file, read_files, unreadable
from counterd.control.service import prepare
from counterd.protocols.counter import PROTOCOL as COUNTER
from counterd.settings import absolute_path, setting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from counterd.contract import ProtocolSpec
    from counterd.control.config.loading import Config


class Mistakes(ValueError):
    problems = ("line 1: wrong", "line 2: wrong too")


def read_words(content: bytes) -> list[str]:
    if content.startswith(b"wrong"):
        raise Mistakes
    return content.decode().split()


@dataclass(frozen=True)
class Paths:
    words: str = setting(absolute_path, "", reload=True)
    others: str = setting(absolute_path, "", reload=True)


READERS = {"gate.words": read_words, "gate.others": read_words}
GATE: ProtocolSpec = replace(
    COUNTER,
    name="gate",
    settings=Paths,
    aliases={},
    windows=None,
    files=Files(READERS, lambda *_: None),
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The configuration of a protocol, both of whose files are in tmp_path: words and others."""
    file = tmp_path / "F"
    file.write_text(f"gate.enable = true\ngate.words = {tmp_path}/words\ngate.others = {tmp_path}/others\n")
    return load(file, [], [GATE])


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_bytes(b"12345")
    assert read_file(str(file), 5) == b"12345"
    with pytest.raises(FileError, match=r"/words has more than 4 bytes$"):
        read_file(str(file), 4)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "cannot be read: No such file or directory"),
        ("folder", "cannot be read: Is a directory"),
        ("pipe", "is not a regular file"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("n" * 300, "cannot be read: File name too long"),
        ("\udcff" * 2 + "\ud800", "cannot be read: 'utf-8' codec can't encode"),
    ],
)
def test_unreadable_files_are_errors_and_do_not_block(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileError) as caught:
        read_file(f"{tmp_path}/{name}", 5)
    assert str(caught.value).startswith(f"{tmp_path}/{name} {why}")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/tty"])
def test_a_device_is_not_read(device: str) -> None:
    with pytest.raises(FileError):
        read_file(device, 5)


def test_reading_a_file_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat, "S_ISREG", lambda _mode: True)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(FileError, match="/pipe cannot be read: it has no data yet"):
            read_file(f"{tmp_path}/pipe", 5)
    finally:
        os.close(writer)


@contextlib.contextmanager
def written(path: Path, *pieces: bytes) -> Iterator[None]:
    """A pipe into which somebody writes these pieces."""
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            for piece in pieces:
                pipe.write(piece)

    writer = threading.Thread(target=write)
    writer.start()
    yield
    writer.join()


def test_a_pipe_is_read_to_its_end_within_the_timeout(tmp_path: Path) -> None:
    with written(tmp_path / "pipe", b"one\n", b"x" * 200_000, b"two"):
        assert read_file(f"{tmp_path}/pipe", 1 << 20, 60.0) == b"one\n" + b"x" * 200_000 + b"two"


def test_a_pipe_without_an_end_is_read_up_to_the_size_limit(tmp_path: Path) -> None:
    with written(tmp_path / "pipe", *[b"x" * 100_000] * 100), pytest.raises(FileError, match="more than 99999 bytes"):
        read_file(f"{tmp_path}/pipe", 99_999, 60.0)


@pytest.mark.parametrize("has_writer", [False, True])
def test_reading_an_unwritten_pipe_times_out(tmp_path: Path, has_writer: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    keeper = os.open(tmp_path / "pipe", os.O_RDWR) if has_writer else -1
    try:
        with pytest.raises(FileError, match=r"is a pipe that was not written to its end within 0\.01 s"):
            read_file(f"{tmp_path}/pipe", 5, 0.01)
    finally:
        if has_writer:
            os.close(keeper)


def test_each_file_is_read_by_its_own_reader(config: Config, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("a b")
    (tmp_path / "others").write_text("")
    assert read_files(READERS, config.values, config.place) == ({"gate.words": ["a", "b"], "gate.others": []}, [])
    assert prepare(GATE, config).files == {"gate.words": ["a", "b"], "gate.others": []}


def test_no_path_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "F"
    file.write_text("gate.enable = true\n")
    config = load(file, [], [GATE])
    assert read_files(READERS, config.values, config.place) == ({}, [])
    assert all(not setting.default for key, setting in settings_for([GATE]).items() if key in READERS)


def test_every_mistake_is_a_message_with_its_place(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words").write_text("wrong")
    (tmp_path / "others").write_bytes(b"\xff")
    assert read_files(READERS, config.values, config.place)[1] == [
        f"{tmp_path}/F:2: gate.words: {tmp_path}/words: line 1: wrong",
        f"{tmp_path}/F:2: gate.words: {tmp_path}/words: line 2: wrong too",
        f"{tmp_path}/F:3: gate.others: {tmp_path}/others: 'utf-8' codec can't decode byte 0xff in position 0:"
        " invalid start byte",
    ]
    (tmp_path / "words").unlink()
    monkeypatch.setattr(files, "FILE_MAX", 0)
    assert read_files(READERS, config.values, config.place)[1] == [
        f"{tmp_path}/F:2: gate.words: {tmp_path}/words cannot be read: No such file or directory",
        f"{tmp_path}/F:3: gate.others: {tmp_path}/others has more than 0 bytes",
    ]


def test_the_number_of_messages_is_bounded() -> None:
    def lines(count: int) -> list[str]:
        error = ValueError()
        error.problems = [str(number) for number in range(count)]  # type: ignore[attr-defined]
        return problems_of(error)

    assert [len(lines(count)) for count in (1, 100, 101, 102, 1000)] == [1, 100, 101, 101, 101]
    assert lines(101)[-1] == "100"
    assert lines(1000)[-2:] == ["99", "and 900 more mistakes"]


def test_files_that_the_user_cannot_read_again_are_reported(config: Config, tmp_path: Path) -> None:
    (tmp_path / "words").touch()
    paths = {"gate.words": f"{tmp_path}/words", "gate.others": f"{tmp_path}/others", "gate.third": ""}
    assert unreadable(paths, config.place) == [
        f"{tmp_path}/F:3: gate.others: uid {os.geteuid()} cannot read {tmp_path}/others,"
        " so the next reload will be refused"
    ]
