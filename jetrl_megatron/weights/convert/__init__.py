"""Conversion of whole checkpoints, streamed: a `Job` is a list of output files, each made of small steps."""
