"""A run from start to end: validation, training, checkpoints, experiments and comparisons."""
