"""Search for a plan: proposers find candidates, measures compute the candidates' peaks, a pool chooses the best."""
