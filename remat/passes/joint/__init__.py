"""Passes that clean up, classify and tag the nodes of the joint graph."""
