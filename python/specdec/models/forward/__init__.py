"""One model over its cache: attention, prompts in chunks, and recordings of small forwards."""
