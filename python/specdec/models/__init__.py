"""One Hugging Face model over its static cache: attention, memory, what is supported, how it is loaded."""
