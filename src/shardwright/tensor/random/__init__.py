"""Random ops: drawn as on one device, or by a counter from logical indices."""
