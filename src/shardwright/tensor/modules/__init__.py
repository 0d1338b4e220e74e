"""The parameters of modules: found, placed all or none, tied ones once."""
