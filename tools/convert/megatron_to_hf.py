"""`jetrl convert megatron-to-hf` as a script; see --help."""

from jetrl_megatron.cli.convert import megatron_to_hf, script

if __name__ == "__main__":
    script(megatron_to_hf)
