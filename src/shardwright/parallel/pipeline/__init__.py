"""Pipelines: a model cut into stages that run on the ranks of one axis, micro-batch by micro-batch."""
