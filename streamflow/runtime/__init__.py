"""The runtime: requests, the component that is streamed, and the offload that owns all of it."""
