"""Show a plan to people: rows, figures and text."""
