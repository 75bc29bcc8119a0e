"""For plugin authors and our own tests: toy parts (`headrace.testing.toy`), a rig that drives an executor by hand
(`headrace.testing.rig`) and conformance classes (`headrace.testing.conformance`, needs pytest)."""
