"""Passes that apply saved-tensor hooks or offloading to the forward and backward graphs."""
