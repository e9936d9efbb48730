"""Which batch and budget fit a device."""
