"""Capture and analyse joint graphs: roles, operators, storages, costs, liveness, verification."""
