"""`jetrl convert fp8-to-bf16` as a script; see --help."""

from jetrl_megatron.cli.convert import fp8_to_bf16, script

if __name__ == "__main__":
    script(fp8_to_bf16)
