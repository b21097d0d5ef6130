"""Is specdec faster than transformers, and is it exact? Both are measured on the models that are going to be used."""
