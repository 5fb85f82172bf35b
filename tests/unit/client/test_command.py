"""@command makes one method for the blocking client, for asyncio and for pipelines."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from counterd.client._command import AsyncBase, CommandBase, PipelineBase, Request, SyncBase, command


class Commands(CommandBase):
    @command
    def double(self, number: int, *, plus: int = 0) -> Request[int]:
        """Twice the number."""
        return Request(b"%d" % number, lambda _: 2 * number + plus)


class Client(Commands, SyncBase):
    def _run_command(self, request: Request[Any]) -> Any:
        return request.read([])


class AsyncClient(Commands, AsyncBase):
    async def _run_command(self, request: Request[Any]) -> Any:
        return request.read([])


class Pipeline(Commands, PipelineBase):
    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def _run_command(self, request: Request[Any]) -> Any:
        self.frames.append(request.frame)
        return self


def test_each_kind_of_client_executes_the_command() -> None:
    assert Client().double(4, plus=1) == 9
    assert asyncio.run(AsyncClient().double(4)) == 8
    assert Pipeline().double(4).double(number=5).frames == [b"4", b"5"]


def test_a_command_keeps_docstring_and_signature() -> None:
    assert inspect.getdoc(Client.double) == "Twice the number."
    assert str(inspect.signature(Client().double)) == "(number: 'int', *, plus: 'int' = 0) -> 'int'"


def test_the_default_patience_and_repeatability_of_a_request() -> None:
    request = Request(b"x", list)
    assert (request.patience, request.is_repeatable) == (0.0, False)
