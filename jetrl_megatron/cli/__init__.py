"""The `jetrl` command."""
