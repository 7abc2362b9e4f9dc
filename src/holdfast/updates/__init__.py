"""Processing of client updates before aggregation: clipping, noise, privacy accounts, compression, robust means."""
