"""The training command: a mixture-of-experts decoder on bytes, under N-D parallelism."""
