"""Measure data-parallel training, and compare two runs honestly: ``gradsync bench``, ``diff``."""
