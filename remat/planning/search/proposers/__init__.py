"""Proposers: functions and classes that each find candidates of one graph by another method."""
