"""Final weights that replicas and restarts share: who they are, how they are made, and how a model gets them back.

`streamflow.store` keeps the files; here is what it takes to turn a model into them and back.
"""
