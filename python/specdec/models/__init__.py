"""Runs one Hugging Face model over its static KV cache: attention, memory, supported models, loading."""
