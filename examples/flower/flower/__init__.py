"""A federation."""
