"""Tools a client offers: their definitions, and the formats in which models write calls."""
