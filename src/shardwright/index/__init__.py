"""Which elements: runs of a dim, regions, memory, views as index maps. Integers only."""
