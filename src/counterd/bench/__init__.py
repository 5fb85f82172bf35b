"""counterbench: puts load on a server, and reports the results. Floor 5 (ARCHITECTURE.md): the daemon does not
need it.

plan.py describes a run, _load.pyx executes it, and run.py supervises it. result.py has the result of a run, which
report.py, page.py and chart.py show. dialects/ has what is said to each kind of server. The extra `bench` has the
dependencies of counterbench.
"""
