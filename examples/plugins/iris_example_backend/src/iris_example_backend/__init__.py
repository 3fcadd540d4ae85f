"""A distribution that extends Iris: allocator "example", backend "example", collective "example-two-shot".

Imports nothing: `iris plugins` imports this package to list it, so torch and numpy have to wait until they are needed.

    from iris_example_backend import language as ex

    @ex.kernel
    def hello(target, bases, rank, peer):
        ex.store(target, 42, rank, peer, bases)
"""

__version__ = "0.1.0"
