"""The `Pass` contract, the analyses, and the manager that runs a pipeline."""
