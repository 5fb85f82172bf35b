"""run_in_thread: its result or exception comes back to the loop, and a caller may stop waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from counterd.control.threads import NoThread, run_in_thread


def test_results_and_exceptions_come_back() -> None:
    async def main() -> None:
        assert await run_in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 / 0)

    asyncio.run(main())


def test_an_error_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with pytest.raises(NoThread, match="cannot start a thread: can't start new thread"):
            await run_in_thread(threading.get_ident)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_caller_gets_no_result(fails: bool) -> None:
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


def test_the_loop_may_end_before_the_thread() -> None:
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
