"""Record of a step: operators, modules and lifetimes of memory."""
