"""`jetrl convert inspect` as a script; see --help."""

from jetrl_megatron.cli.convert import inspect_checkpoint, script

if __name__ == "__main__":
    script(inspect_checkpoint)
