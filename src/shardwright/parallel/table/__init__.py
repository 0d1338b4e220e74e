"""One table for a whole model: which strategy places which modules, applied in the right order, or none."""
