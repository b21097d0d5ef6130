"""The heads that train_embedded_heads.py trains, each in a file of its own."""
