"""Runs the reference servers, yrmcdsd and beanstalkd, for tests that compare counterd with them.

The servers listen on free ports of loopback addresses and are ended by their pids. Tests that need them are marked.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from kit import needs
from kit.daemon import Address
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# yrmcdsd binds virtual_ip and bind_ip, so they must differ. It is a master only if an interface has virtual_ip.
VIRTUAL_IP = "127.0.0.1"
BIND_IP = "127.0.0.2"
START_SECONDS = 10.0
STOP_SECONDS = 1.0  # after clients have reset connections, it may spin for ever instead of ending
TRIES = 3  # another process can take a free port before yrmcdsd does

NOOP = bytes.fromhex("90 00 0000 00000000 00000000")

# One worker, because yrmcdsd loses a job, and its connection, that it gives to a worker thread that does not run yet.
# With one worker, the first answer shows that it runs. With several, the others could still lose a job.
CONFIG = """\
virtual_ip = {virtual_ip}
bind_ip = {bind_ip}
port = {ports[0]}
repl_port = {ports[1]}
temp_dir = "{directory}"
buckets = 10000
workers = 1
counter.enable = true
counter.port = {ports[2]}
counter.buckets = 10000
"""


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Address]:
    """Runs a yrmcdsd with the counter extension during the block. directory: for its files.

    Fails the test if it does not start.
    """
    process, address = _started(needs.path("yrmcdsd"), directory)
    try:
        yield address
    finally:
        _stop(process)


@contextlib.contextmanager
def beanstalkd(*arguments: str) -> Iterator[Address]:
    """Runs a beanstalkd with more arguments during the block. Fails the test if it does not start."""
    for _ in range(TRIES):
        address = Address(VIRTUAL_IP, free_ports(1)[0])
        process = subprocess.Popen(
            [needs.path("beanstalkd"), "-l", address.host, "-p", str(address.port), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            if _comes_up(process, address, b"list-tube-used\r\n", b"U"):
                yield address
                return
        finally:
            _stop(process)
    pytest.fail("beanstalkd does not start")


def _started(program: str, directory: Path) -> tuple[subprocess.Popen[bytes], Address]:
    config, log = directory / "yrmcds.conf", directory / "yrmcds.log"
    for _ in range(TRIES):
        ports = free_ports(3, (VIRTUAL_IP, BIND_IP))
        config.write_text(CONFIG.format(virtual_ip=VIRTUAL_IP, bind_ip=BIND_IP, ports=ports, directory=directory))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program, "-f", str(config)], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        address = Address(VIRTUAL_IP, ports[2])
        try:
            if _comes_up(process, address, NOOP, b"\x91"):
                return process, address
        except BaseException:
            _stop(process)
            raise
        _stop(process)
    pytest.fail(f"yrmcdsd does not start:\n{log.read_text(errors='replace')}")


def _comes_up(process: subprocess.Popen[bytes], address: Address, asked: bytes, answer: bytes) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(address, asked, answer):
            return True
        time.sleep(0.02)
    return False


def _answers(address: Address, asked: bytes, answer: bytes) -> bool:
    """Returns True if the server's answer begins as expected."""
    try:
        with socket.create_connection(address, timeout=1.0) as connection:
            connection.sendall(asked)
            return connection.recv(1) == answer
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
