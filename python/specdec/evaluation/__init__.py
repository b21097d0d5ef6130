"""Is it faster, and is it exact: measured beside transformers, verified on the models at hand."""
