"""Ways to run a call that is not one local call per rank."""
