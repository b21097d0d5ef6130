"""Modules in place of a model's own: linear layers, norms and what stands beside them, and weights of fewer bits."""
