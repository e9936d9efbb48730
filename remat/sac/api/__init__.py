"""Functions that make, check, apply and remove plans for eager code."""
