"""Attention over a sequence that is cut: a ring of keys and values, or an exchange of heads for positions."""
