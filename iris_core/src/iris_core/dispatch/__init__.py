"""From a call to a launch: the request, the choice of an algorithm, its plan, and the order on streams."""
