"""Engines: whatever trains the clients of a round, and the rounds around them."""
