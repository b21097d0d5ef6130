"""Static caches: keys and values, states, what heads read."""
