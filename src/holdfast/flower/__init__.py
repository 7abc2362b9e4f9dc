"""Real federations on Flower: data stays where it is, the method file stays as it is.

A Flower app needs one module. It says where a site's samples are, what the server tests with, and, where these
are one's own, which model and method; see `FlowerApp`. Flower's SuperLink and SuperNodes do the networking, TLS
and node authentication.
"""

from holdfast.flower.app import FlowerApp, for_server

__all__ = ["FlowerApp", "for_server"]
