"""What ran in a step: operators, modules, and how long memory lived."""
