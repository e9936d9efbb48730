"""Choice of the modules to checkpoint, and of the results that each of these modules stores."""
