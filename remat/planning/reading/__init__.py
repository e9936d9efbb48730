"""What people read of a plan: rows, figures, text."""
