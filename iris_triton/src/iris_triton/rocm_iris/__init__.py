"""AMD's Iris: everything that exists for its scripts alone, and the table of its names.

    names            the table, and modules with the paths of AMD's Iris (`import iris_triton.as_iris`)
    ported_context   Iris: its constructor, attributes and methods; ctx.tracing with its buffers; functions of the host,
                     tensors at addresses
    collectives      ctx.ccl with its layouts and workspaces, groups as strides
    operations       ctx.ops; both as functions of a context: `iris.ops.X(ctx, ...)`
    configs          Config and FusedConfig whose fields can be assigned, and are advice; asynchronous operations
    x                collectives on tiles as functions
    bench, hip

What is different on purpose is in docs/porting.md.  Contexts of `iris_core.Iris` have none of this.
Importing this package imports neither torch nor triton.
"""
