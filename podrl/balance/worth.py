def compare(*a): return []
