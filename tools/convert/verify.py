"""`jetrl convert verify` as a script; see --help."""

from jetrl_megatron.cli.convert import script, verify

if __name__ == "__main__":
    script(verify)
