"""The admin process: HTTP for people, Prometheus and orchestrators. A side: it asks the daemon as a stranger would.

It is a child of the daemon with a loop of its own, so whatever is asked of it, and however slow its clients are, costs
the daemon no more than the few questions that control/admin.py answers.
"""
