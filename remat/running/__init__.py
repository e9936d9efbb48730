"""Running graphs for real: random values, comparing results, measuring what is alive."""
