"""The embedded model: how it was built, what its words say, and teaching a base a game before training."""
