"""Defaults that the command line's help shows without importing the package that uses them."""

DASHBOARD_PORT = 8642
