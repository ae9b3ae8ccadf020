"""The demo: a small diffusion transformer that draws handwritten digits, and a classifier that reads them."""
