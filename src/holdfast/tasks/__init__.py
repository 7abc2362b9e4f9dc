"""Learning tasks: the format of targets, the loss, the number of outputs, the metrics and the strata."""
