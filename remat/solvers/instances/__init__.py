"""Problem instances, which are stored in files."""
