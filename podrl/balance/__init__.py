"""What limits a run, and the balance between CPU and accelerator."""
