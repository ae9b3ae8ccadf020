"""Page-locking host memory for a device: which ranges, in which pieces, whether it is safe to try, and the way back."""
