"""Training side: real Megatron-Core with our linears, norms, attention and activation. The only importer of megatron."""
