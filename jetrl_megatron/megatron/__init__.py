"""Training side: real Megatron-Core with our linears, norms, attention and activation. It alone imports megatron."""
