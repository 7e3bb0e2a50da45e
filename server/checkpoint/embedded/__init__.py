"""The model that is served where none is named: fetched once, converted to NF4."""
