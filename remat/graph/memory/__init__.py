"""Storages, their owners, their lifetimes, and the bytes alive."""
