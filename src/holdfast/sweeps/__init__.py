"""Parallel runs: processes lease jobs from a queue on disk until all are done or the deadline passes."""
