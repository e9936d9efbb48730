"""Which modules to checkpoint, and what each of them stores."""
