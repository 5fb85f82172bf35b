"""counterbench: puts load on a server, and reports the results. Floor: side (ARCHITECTURE.md): the daemon does not need
it.

plan.py describes a run, _load.pyx executes it, and run.py supervises it. result.py has the result of a run, which
report.py, page.py and chart.py show. The load.py of each protocol makes the requests; dialects/ makes the requests for
other servers. The dependencies of counterbench are in the extra `bench`.
"""
