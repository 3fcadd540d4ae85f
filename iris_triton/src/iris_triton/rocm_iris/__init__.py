"""AMD's Iris: everything that exists for its scripts alone, and the table of its names (`names`).

What is different on purpose is in docs/porting.md.  Contexts of `iris_core.Iris` have none of this.
Importing this package imports neither torch nor triton.
"""
