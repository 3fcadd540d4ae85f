"""What a kernel says: builtins, operators and types of Triton, computed with numpy."""
