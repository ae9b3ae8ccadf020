"""The test kit of the engine: a device that chooses its own order, scripted sources, and passes that check bytes.

It ships with the library, so that the owner of another device, transfer or source can hold it against the same tests.
"""
