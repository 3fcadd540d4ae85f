"""The face of the reference system: what `import iris_triton as iris` gives beyond names that are ours as well.

    context       Iris: its constructor, attributes and methods
    collectives   ctx.ccl with its layouts and workspaces
    operations    ctx.ops, and `iris.ops.X(ctx, ...)`
    configs       Config and FusedConfig whose fields can be assigned, and which are advice
    pending       asynchronous operations: what stands for one, and those that barriers wait for
    groups        a group as first rank and stride
    engines       copy engines, of which there are none
    pointers      tensors made of addresses
    tiles         reductions of tiles for which the kernel raises flags

What is different on purpose is in docs/porting.md.  Contexts of `iris_core.Iris` have none of this.
Importing this package imports neither torch nor triton.
"""
