"""The symmetric heap: memory that every rank has at the same offsets and reaches on all others."""
