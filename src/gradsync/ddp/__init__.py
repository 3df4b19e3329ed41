"""Data-parallel training: the wrapper, its reducer, and their parts."""
