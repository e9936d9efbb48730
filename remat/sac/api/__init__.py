"""Plans for eager code: made in one call, and put to work."""
