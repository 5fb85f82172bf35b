"""The parts of the suite: which build each test is run with, and which tests are proofs.

Each test belongs to one part, and `make test` runs the first two:

    engine    what runs in memory: the engine, the protocols, their models. With assertions compiled in
    daemon    what people touch: sockets, processes, clients, commands, vectors. With the release build
    proofs    what proves a promise about the whole system, not about a change: `make prove`, before a release

`pytest --part NAME` runs one of them; without the option, pytest runs all that it is given.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest

ENGINE = (
    "tests/fuzz/",
    "tests/history/",
    "tests/property/",
    "tests/simulation/",
    "tests/unit/engine/",
    "tests/unit/net/",
    "tests/unit/protocols/",
    "tests/unit/test_core.py",
)

# {beginning of a test's name: what would notice the same defect in the other parts, or why nothing has to}
PROOFS: Mapping[str, str] = {
    "tests/chaos/test_chaos.py::test_no_promise_is_broken":
        "tests/functional, tests/simulation, tests/history on engines in memory; the rest of the file checks the judge",
    "tests/drills/test_drills.py":
        "in tests/functional: test_drain.py, test_reload.py, test_certificates.py, test_logs.py, test_admin.py",
    "tests/drills/test_shared.py::test_no_limit_is_exceeded":
        "tests/simulation/test_shared.py, tests/functional/test_cluster.py",
    "tests/drills/test_shared.py::test_limits_are_kept_between_hosts":
        "tests/simulation/test_shared.py, tests/functional/test_cluster.py",
    "tests/functional/test_aio.py::test_ten_thousand_wait_for_one_name[yrmcdsd":
        "the same test with counterd",
    "tests/functional/test_counterbench":
        "the smokes below, `make bench-smoke`, tests/unit/bench; what is finer concerns the load tester alone",
    "tests/history/test_daemon": "the same histories of engines in memory, in the files without daemon in their names",
    "tests/history/test_loans.py::test_wrong_server_is_caught":
        "the same mistakes by hand: test_wrong_history_is_caught",
    "tests/history/test_resumptions.py::test_wrong_server_is_caught":
        "the same mistakes by hand: test_wrong_history_is_caught",
    "tests/history/test_takes.py::test_wrong_server_is_caught":
        "the same mistakes by hand: test_wrong_history_is_caught",
    "tests/meta/test_deletion.py": "tests/meta/test_floors.py: no module names a protocol that is not its own",
    "tests/meta/test_model.py::test_the_models_hold":
        "nothing: it checks the formal models. test_functions_named_by_the_models_exist says when they need a review",
    "tests/simulation/test_beanstalk.py::test_a_broken_promise_is_told":
        "nothing: it checks the simulation's judge",
    "tests/simulation/test_simulation.py::test_every_answer_is_given_in_some_world":
        "nothing: it checks that the simulated worlds are rich enough",
    "tests/simulation/test_shared.py::test_a_defect_is_noticed": "nothing: it checks the simulation's judge",
    "tests/simulation/test_shared.py::test_few_permits_are_left_unused":
        "tests/unit/cluster/test_lease_policy.py; utilisation is a figure of docs/scale.md, not a limit",
    "tests/simulation/test_shared.py::test_hundreds_of_daemons": "test_nothing_is_granted_above_its_maximum",
    "tests/simulation/test_shared.py::test_nobody_starves[model-": "test_nobody_starves with daemons",
    "tests/simulation/test_shared.py::test_rights_that_stay_are_noticed": "nothing: it checks the simulation's judge",
    "tests/simulation/test_shared.py::test_turns_that_never_end_are_noticed":
        "nothing: it checks the simulation's judge",
    "tests/simulation/test_smockron.py::test_a_broken_promise_is_told":
        "nothing: it checks the simulation's judge",
    "tests/simulation/test_takes.py::test_a_broken_promise_is_told":
        "nothing: it checks the simulation's judge",
}  # fmt: skip

# What would notice the same defect: the same test with asyncio's own loop.
LOOPS = re.compile(r"\[(?:.*-)?uvloop(?:-.*)?\]$")

# One test of the load tester for each protocol, and one for its command: these are not among the proofs.
SMOKES = (
    "tests/functional/test_counterbench.py::test_acquire_and_release_in_turn",
    "tests/functional/test_counterbench.py::test_a_load_on_the_real_server",
    "tests/functional/test_counterbench_beanstalk.py::test_every_kind_of_request",
    "tests/functional/test_counterbench_command.py::test_a_wrong_option_is_named",
    "tests/functional/test_counterbench_command.py::test_a_run_prints_its_results",
    "tests/functional/test_counterbench_sentinel.py::test_every_kind_of_request",
    "tests/functional/test_counterbench_smockron.py::test_every_kind_of_request",
    "tests/functional/test_counterbench_takes.py::test_refusals_take_nothing_of_any_item",
    "tests/functional/test_counterbench_throttr.py::test_every_kind_of_request",
)

NAMES = ("engine", "daemon", "proofs")


def part_of(test: str) -> str:
    """Returns the part of a test with this name, as pytest writes it."""
    if (test.startswith(tuple(PROOFS)) and not test.startswith(SMOKES)) or LOOPS.search(test):
        return "proofs"
    return "engine" if test.startswith(ENGINE) else "daemon"


# ---- for conftest.py -------------------------------------------------------------------------------------------------


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=NAMES, help="only this part of the suite: tests/kit/parts.py")


def may_have(path: str, part: str) -> bool:
    """Returns whether a file or folder with this name, below the project's root, may have tests of the part."""
    if part == "proofs":
        return True
    if part == "daemon":
        return not f"{path}/".startswith(ENGINE)
    return any(folder.startswith(path) or path.startswith(folder) for folder in ENGINE)


def ignores(config: pytest.Config, path: Path) -> bool | None:
    """Returns True if a path has nothing of the part that was asked for: then its tests are not even imported."""
    part = config.getoption("--part")
    return True if part and not may_have(path.relative_to(config.rootpath).as_posix(), part) else None


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the tests of other parts, if a part was asked for."""
    if wanted := config.getoption("--part"):
        others = [item for item in items if part_of(item.nodeid) != wanted]
        items[:] = [item for item in items if part_of(item.nodeid) == wanted]
        config.hook.pytest_deselected(items=others)
