"""Choice of the modules to checkpoint, and of the results that each stores."""
