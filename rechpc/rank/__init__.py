"""What runs inside the container, one process a GPU: knows torch and TorchRec, never Slurm or Hydra."""
