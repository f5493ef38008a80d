"""specdec bench chaos: exact texts while processes are killed and hung."""
