"""These tests need Flower, which is installed by the extra ``flower``."""

import importlib.util

if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]
