"""For plugin authors and our own tests: toy parts (`headrace.testing.toy`), a rig that drives an executor by hand
(`headrace.testing.rig`), conformance classes (`headrace.testing.conformance`, needs pytest), and
`constraint_accepts`, which walks a text through a constraint engine."""

from headrace.testing.accepts import constraint_accepts

__all__ = ["constraint_accepts"]
