"""What runs on the login node and once on every compute node, outside the container; never imports torch."""
