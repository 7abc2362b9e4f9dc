"""Data: where samples come from, who holds them, and when they arrive."""
