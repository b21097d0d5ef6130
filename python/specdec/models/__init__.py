"""Hugging Face models over static KV caches: which are supported, how large their caches are, and rooms for the rest."""
