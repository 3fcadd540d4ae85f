"""Plugins that are wrong on purpose, one mistake each.  Found through entry points that test_mutants installs."""
