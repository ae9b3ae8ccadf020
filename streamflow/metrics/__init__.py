"""Metrics for Prometheus, through prometheus_client (the extra ``serve``). Imported only by who wants them."""
