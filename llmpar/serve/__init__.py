"""Answer requests: one token after the other, from a cache."""
