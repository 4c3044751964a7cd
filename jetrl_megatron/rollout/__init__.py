"""Rollout side: real SGLang, extended only through its plugin entry points. The only importer of sglang."""
