"""The vectorized engine: many clients train as one batched program."""
