"""One forward of a model for one stage: followed, answered for what other stages hold, compared."""
