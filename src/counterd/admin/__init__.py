"""The admin process: serves HTTP for people, Prometheus and orchestrators. Floor: side (ARCHITECTURE.md). The daemon
does not trust this process.

The admin process is a child process of the daemon with its own event loop. So HTTP requests and slow clients cost the
daemon only a few questions, which control/admin.py answers.
"""
