"""Benchmarks: each measures a baseline in the same run, alternating with ours, and reports medians."""
