"""Answers as text: words, tables, and pictures in a terminal."""
