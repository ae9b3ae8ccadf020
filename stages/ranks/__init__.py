"""What the ranks of a gather group agree on, and what they move together: process groups, slices, waves."""
