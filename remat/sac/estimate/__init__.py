"""What checkpointing each module of a model frees, and what it takes."""
