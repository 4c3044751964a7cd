"""`jetrl convert hf-to-megatron` as a script; see --help."""

from jetrl_megatron.cli.convert import hf_to_megatron, script

if __name__ == "__main__":
    script(hf_to_megatron)
