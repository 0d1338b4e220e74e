"""Times beside a peer, in one run. `python -m bench [NAME...]`; `make bench` runs all."""
