"""Many runs side by side: jobs that processes lease from a queue on disk, until all are done or time is up."""
