"""`iris tune`: which algorithm is the fastest on this machine, measured on verified data."""
