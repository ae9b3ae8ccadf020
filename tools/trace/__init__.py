"""``streamflow trace``: reading traces, saying what they tell, drawing and comparing them."""
