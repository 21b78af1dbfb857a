"""Tests of the resilience room."""
