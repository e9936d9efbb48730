"""This package reads and writes problem instances, which are stored in files."""
