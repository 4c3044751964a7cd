"""`jetrl convert reshard` as a script; see --help."""

from jetrl_megatron.cli.convert import reshard, script

if __name__ == "__main__":
    script(reshard)
