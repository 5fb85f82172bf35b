"""A function beside the loop: what it returns and raises comes back, and nobody has to wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from counterd.control.threads import NoThread, run_in_thread


def test_what_it_returns_and_raises_comes_back() -> None:
    async def main() -> None:
        assert await run_in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 / 0)

    asyncio.run(main())


def test_there_may_be_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with pytest.raises(NoThread, match="cannot start a thread: can't start new thread"):
            await run_in_thread(threading.get_ident)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_does_not_wait_any_more_is_not_told(fails: bool) -> None:
    let_go, begun = threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def function() -> None:
        found.append(threading.current_thread())
        begun.set()
        let_go.wait()
        if fails:
            raise ValueError

    async def main() -> None:
        caught: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
        task = asyncio.create_task(run_in_thread(function))
        await asyncio.sleep(0)
        assert begun.wait(10)
        task.cancel()
        await asyncio.wait([task])
        let_go.set()
        found[0].join()
        await asyncio.sleep(0)
        assert caught == []

    asyncio.run(main())


def test_the_loop_may_end_first() -> None:
    let_go, begun = threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def function() -> None:
        found.append(threading.current_thread())
        begun.set()
        let_go.wait()

    async def main() -> None:
        task = asyncio.create_task(run_in_thread(function))
        await asyncio.sleep(0)
        assert begun.wait(10)
        task.cancel()

    asyncio.run(main())
    assert found[0].daemon
    let_go.set()
    found[0].join()
