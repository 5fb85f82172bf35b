"""The admin process: serves HTTP for people, Prometheus and orchestrators. A side: the daemon does not trust it.

It is a child process of the daemon with its own event loop. So requests to it, and slow clients, cost the daemon only
the few questions that control/admin.py answers.
"""
