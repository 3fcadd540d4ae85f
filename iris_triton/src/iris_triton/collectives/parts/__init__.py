"""Parts of collectives: elements, the barrier between programs, sizes, the base of algorithms."""
