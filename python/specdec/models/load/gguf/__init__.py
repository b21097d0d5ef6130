"""GGUF files: what they say, and the model and the tokenizer that they describe."""
