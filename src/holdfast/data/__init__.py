"""Data sets, and their assignment to clients and stages."""
