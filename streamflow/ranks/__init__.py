"""Many ranks: which of them gather, what is supported together, what they have to agree on, and their options."""
