"""`jetrl convert bf16-to-fp8` as a script; see --help."""

from jetrl_megatron.cli.convert import bf16_to_fp8, script

if __name__ == "__main__":
    script(bf16_to_fp8)
