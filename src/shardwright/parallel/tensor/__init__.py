"""Tensor parallelism in the words that models bring: what a word means, where it goes, what it cuts."""
