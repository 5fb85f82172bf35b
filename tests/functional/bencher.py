"""counterbench as a process of its own, without its command line: one plan, one run, its result in a file.

    python bencher.py < JOB

JOB: a pickled dictionary; see loading.py, which writes it.
"""

from __future__ import annotations

import importlib
import pickle
import resource
import sys
from typing import Any

job: dict[str, Any] = pickle.load(sys.stdin.buffer)
for name, value in job["patches"].items():
    module, _, variable = name.rpartition(".")
    setattr(importlib.import_module(module), variable, value)
if job["limit"]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (job["limit"], job["limit"]))

from counterd.bench.result import Report, save  # noqa: E402
from counterd.bench.run import LoadError, run  # noqa: E402

try:
    report = Report([run(job["plan"])], machine={}, versions={})
except LoadError as error:
    sys.exit(f"LoadError: {error}")
save(report, job["result"])
