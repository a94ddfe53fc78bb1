"""Preference pairs: selection and replay."""
