"""Files that start a plan's run on every host: by Slurm, on Kubernetes, or over ssh."""
