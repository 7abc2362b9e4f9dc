"""Learning tasks: what a target looks like, the loss, the number of outputs, the metrics, and what a stratum is."""
