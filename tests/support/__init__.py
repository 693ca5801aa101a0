"""Shared by the tests of several rooms: data, programs, conformance classes."""
