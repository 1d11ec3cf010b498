"""The queue: jobs in SQL, a scheduler with GPU leases, one subprocess a job.

A job is a command of the CLI in a process of its own, so nothing here imports an engine, and the
queue outlives whatever started it: after a crash, jobs that still run are adopted and jobs that can
resume do.
"""
