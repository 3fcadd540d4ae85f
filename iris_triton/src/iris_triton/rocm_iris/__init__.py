"""AMD's Iris: everything that exists for its scripts alone, and the table of its names.

    names            the table, and modules with the paths of that system (`import iris_triton.as_iris`)
    context          Iris: its constructor, attributes and methods
    tracing          ctx.tracing with its buffers
    collectives      ctx.ccl with its layouts and workspaces; functions: the same as functions of a context
    operations       ctx.ops, and `iris.ops.X(ctx, ...)`
    configs          Config and FusedConfig whose fields can be assigned, and which are advice
    pending          asynchronous operations: what stands for one, and those that barriers wait for
    distributed      groups as first rank and stride, exchanges of torch.distributed
    tensor_creation  the factories as functions of a heap
    x                collectives on tiles as functions
    bench, hip, host, pointers, engines

What is different on purpose is in docs/porting.md.  Contexts of `iris_core.Iris` have none of this.
Importing this package imports neither torch nor triton.
"""
