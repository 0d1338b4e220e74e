"""What programs are made of: each family is a function that adds one or a few steps to a scope."""
