"""Choose which modules of a model to checkpoint, and which results each of these modules stores."""
