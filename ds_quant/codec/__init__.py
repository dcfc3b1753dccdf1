"""Codecs: floats to wire bytes and back, with the random bits, rotations and levels they use."""
