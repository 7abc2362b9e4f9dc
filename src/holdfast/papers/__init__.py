"""The papers' tables: their settings, their published numbers, and our runs of them."""
