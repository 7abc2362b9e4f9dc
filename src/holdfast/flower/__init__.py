"""Federations of real sites on Flower, for every method and without changes to it.

A Flower app is one module with a `FlowerApp`: functions that return a site's samples and the server's, and optionally
a model and a method of the user's own. Flower's SuperLink and SuperNodes provide networking, TLS and node
authentication.
"""

from holdfast.flower.app import FlowerApp, for_server

__all__ = ["FlowerApp", "for_server"]
