"""streamflow."""
