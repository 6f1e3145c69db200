"""Commands of ``autoparallel`` as declarations; importing them does not import torch."""
