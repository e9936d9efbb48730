"""What a joint graph is: capture, roles, operators, storages and bytes, costs, liveness, verification."""
