"""Engines, which train the clients of a round, and the round loop."""
