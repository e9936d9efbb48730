"""Agreement of the ranks of a job: all ranks with the same graph use the same plan."""
