"""Plain tensors, the host and torch's own functions beside DTensors."""
