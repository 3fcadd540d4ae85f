"""What portable collectives are made of: elements, the barrier between programs, sizes, plans."""
