"""`python -m jetrl_megatron.cli` is `jetrl`. The guard matters: spawned children import this module again."""

from jetrl_megatron.cli.main import app

if __name__ == "__main__":
    app(prog_name="jetrl")
