"""The commands of ``autoparallel``, one file each; torch is imported only inside them."""
