"""Many engines behind a router: what a router is told, and the order of events between replicas."""
