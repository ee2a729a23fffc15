"""Builders of factor rules for both tables: they see types, and attributes as arguments."""
