"""counterbench: loads a server, and says what came of it. A side of the house: the daemon needs none of it.

plan.py says what a run does, _load.pyx does it, run.py watches over it; result.py is what a run leaves behind, which
report.py, page.py and chart.py show. The load.py of each protocol, and dialects/ for other servers, say what requests
look like. Its own dependencies are the extra `bench`.
"""
