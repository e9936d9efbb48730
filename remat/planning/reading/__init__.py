"""Show a plan to people as tables, texts and pages."""
