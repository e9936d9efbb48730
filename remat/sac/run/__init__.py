"""Recording of a training step: operators, module calls, and lifetimes of storages."""
