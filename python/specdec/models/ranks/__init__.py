"""A model whose weights are divided over several processes, a GPU each."""
