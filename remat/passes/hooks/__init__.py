"""Saved-tensor hooks: packing what forward hands to backward."""
