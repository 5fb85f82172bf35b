"""The plugin host: runs Python code of other people in threads.

Settings name this code. Floor 5 (ARCHITECTURE.md).
"""
