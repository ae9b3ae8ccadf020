"""The programs ``streamflow store ...``: what is in the host weight store, and filling and emptying it."""
