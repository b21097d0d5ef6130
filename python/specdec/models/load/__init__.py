"""Models and tokenizers from folders, GGUF files and the hub: an error instead of half-loaded weights."""
