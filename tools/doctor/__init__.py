"""``streamflow doctor``: what this machine can do, and what would be chosen because of it."""
