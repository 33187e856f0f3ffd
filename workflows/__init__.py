"""What runs after what. No tensors, no heavy imports."""
