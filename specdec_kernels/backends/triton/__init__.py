def unavailable(d): return "x"
