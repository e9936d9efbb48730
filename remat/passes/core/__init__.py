"""Base classes of passes and analyses, and the pipelines that run passes."""
