"""Placements that views make: what a view sees of a cut, where no simpler placement says it."""
