"""Hugging Face models over static caches: which are supported, how large their caches are, and rooms for the rest."""
