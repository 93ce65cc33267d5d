"""rechpc: train sharded recommendation models on Slurm clusters with AMD Instinct GPUs."""

__version__ = "0.1.0"
