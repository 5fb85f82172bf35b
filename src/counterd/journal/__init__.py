"""Journals: databases that have what a protocol must not forget. Run as a program, the process that writes one."""
