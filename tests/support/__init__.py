"""Helpers shared by the test tiers; nothing here is a test."""
