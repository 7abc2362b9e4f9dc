"""The foundation: errors, files, randomness, devices, trees of tensors, and the specification of settings."""
