"""The kernel language: builtins, operators and types of Triton, computed with numpy."""
