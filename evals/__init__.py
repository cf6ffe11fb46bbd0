"""Paired evaluation of any agents on the same starts and the same luck."""
