"""One call on DTensors: decided once per kind, then run on local tensors."""
