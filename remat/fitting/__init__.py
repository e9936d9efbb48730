"""Find which batch sizes and budgets fit the memory of a device."""
