"""The vectorized engine: many clients train as one batched program.

A lane is one client of that program: the parameters, buffers and batches of all lanes are stacked, ``[L, ...]``, and
one step trains one batch of every lane. A lane that has finished one client continues with another.
"""
