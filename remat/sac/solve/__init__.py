"""Choice of the modules of a model to checkpoint, and of the results that each of these modules stores."""
