"""Functions that apply, remove and measure plans for eager code, or convert them to policies."""
