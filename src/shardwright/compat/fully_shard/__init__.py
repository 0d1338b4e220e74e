"""The inside of torch's `fully_shard`, by what needs its private names: one noun a file."""
