"""The part of the library that is written in C: optional, and with the same answers without it."""
